"""Which share of runs breaks down at a learning rate that is too high."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from gfsa_experiments.results.pretraining.arms import PLAIN, arms_of
from gfsa_experiments.results.statistics import LEVEL

ABOVE = 1.0
"""A run that ends so many nats above the lowest of all arms has broken down."""


@dataclass(frozen=True)
class Breakdowns:
    """How many runs of an arm broke down."""

    arm: str
    broken: int
    runs: int
    low: float
    """Of the share, Clopper's and Pearson's interval."""
    high: float
    p: float | None
    """Fisher's exact test against plain, two-sided; None for plain itself."""
    worst: float | None
    """The highest final loss of a run that did not break down."""


def breakdowns(runs: pd.DataFrame, above: float = ABOVE) -> list[Breakdowns]:
    """Every arm: runs that end without a finite loss, or ``above`` nats over the lowest of all."""
    from scipy.stats import binomtest, fisher_exact

    limit = runs.valid.min() + above
    # a comparison with NaN is false
    runs = runs.assign(broken=~(runs.valid <= limit))
    counts = {arm: runs[runs.arm == arm].broken for arm in arms_of(runs)}
    found = []
    for arm, broken in counts.items():
        interval = binomtest(int(broken.sum()), len(broken)).proportion_ci(LEVEL, "exact")
        p = None
        if arm != PLAIN and PLAIN in counts:
            table = [[int(own.sum()), int((~own).sum())] for own in (broken, counts[PLAIN])]
            p = float(fisher_exact(table).pvalue)
        kept = runs[(runs.arm == arm) & ~runs.broken].valid
        worst = float(kept.max()) if len(kept) else None
        ends = float(interval.low), float(interval.high)
        found.append(Breakdowns(arm, int(broken.sum()), len(broken), *ends, p, worst))
    return found
