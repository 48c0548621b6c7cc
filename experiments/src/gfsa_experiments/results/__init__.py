"""``gfsa results``: tables, figures and verdicts from the rows of runs; needs pandas and scipy."""
