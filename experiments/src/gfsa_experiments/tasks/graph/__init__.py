"""Graphs: data sets, features, models and batches of the graph recipe."""
