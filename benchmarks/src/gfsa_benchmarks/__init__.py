"""One harness for speed and memory: every variant on the same shapes, in one run, interleaved."""
