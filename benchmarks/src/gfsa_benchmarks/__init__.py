"""Benchmarks of speed and memory: all variants on the same shapes, in interleaved rounds."""
