"""Kernels for sequences of any length, a launch a pass."""
