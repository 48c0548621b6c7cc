"""Serving and training engines: one package for each, imported only by its engine."""
