"""What ``gfsa demo`` does: train the digits task with and without filters, and report."""
