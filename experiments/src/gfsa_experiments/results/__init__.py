"""``gfsa results``: tables, figures and verdicts from the rows that runs leave in ``results/``."""
