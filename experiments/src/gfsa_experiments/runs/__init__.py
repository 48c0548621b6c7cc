"""One run or many: folders, rows, sweeps."""
