"""What ``gfsa demo`` does: train a task with and without filters, and report."""
