"""Kernels that hold a whole sequence on chip, up to 256 tokens."""
