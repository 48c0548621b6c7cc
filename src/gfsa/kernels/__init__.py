"""GPU kernels of this library, for filters of degree 1 and 2; importing this imports no Triton."""

from gfsa.kernels.eligibility import reason_against, refusal, refusal_of_decoding

__all__ = ["reason_against", "refusal", "refusal_of_decoding"]
