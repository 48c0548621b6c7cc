"""Python's standard library as text: a byte-level decoder from scratch."""
