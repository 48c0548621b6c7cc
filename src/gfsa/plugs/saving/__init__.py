"""Saved filters: their file, the layers they belong to, and how they come back into a model."""
