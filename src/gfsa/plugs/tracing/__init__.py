"""The tracer: filters for attention that no adapter knows, found by following its softmax."""
