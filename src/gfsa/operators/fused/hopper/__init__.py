"""Kernels of any length for Hopper GPUs, written in Gluon, where their schedule is explicit."""
