"""GPU kernels of this library, for filters of degree 1 and 2; importing this imports no Triton."""
