"""GLUE: sentences and pairs of them."""
