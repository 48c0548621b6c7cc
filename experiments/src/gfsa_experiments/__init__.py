"""Experiments with gfsa: tasks, one training loop, runs, results and their statistics."""
