"""GLUE: classification of sentences and pairs of sentences."""
