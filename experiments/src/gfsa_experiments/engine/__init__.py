"""The training loop that all tasks share, and its parts."""
