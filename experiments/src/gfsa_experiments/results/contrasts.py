"""Two lines of runs against each other, seed by seed: any two, not only a method and plain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from gfsa_experiments.results.statistics import (
    Interval,
    PairedDifference,
    mean_of_groups,
    paired_difference,
)

IN_NATS = {"loss"}
"""Metrics whose relative reduction is that of the perplexity, exp(loss)."""
UNIT_OF_NATS = (
    "of a loss in nats it is that of the perplexity, 1 − exp(difference), so that all language "
    "models are in one unit"
)
"""What pages say of it."""

# runs whose costs differ by no more are taken to have had the same
SAME_DATA = 0.01


@dataclass(frozen=True)
class Contrast:
    """``a − b`` over the seeds for which both have a finite result."""

    test: PairedDifference
    valid: PairedDifference | None
    """The same on the validation split, if every run has it."""
    one_commit: int | None
    """The number of pairs whose two runs are of the same commit; None if no run names one, as with
    an installed package."""
    epochs: float
    """Passes over the data of ``a`` relative to ``b``."""
    seconds: float | None
    """Training time of ``a`` relative to ``b``; None unless all runs shared one kind of device with
    as many others."""
    jobs: int
    """The runs that shared the device; above 1, times are rough."""
    error: float
    """The mean error of ``b``, which relative reductions refer to."""
    metric: str
    """That of the rows."""

    @property
    def reduced(self) -> str:
        """What :attr:`reduction` is a share of: the metric, for a loss in nats the perplexity."""
        return "perplexity" if self.metric in IN_NATS else self.metric

    @property
    def reduction(self) -> Interval | None:
        """The relative reduction of the error in percent, positive where ``a`` is better.

        The denominator is the mean error of ``b``, without uncertainty of its own: the interval
        excludes 0 exactly where that of the difference does. None where ``b`` makes no error.
        For a loss in nats it is that of the perplexity, ``1 − exp(difference)``.
        """
        if not self._can_be_reduced:
            return None
        found = self.test.interval
        ends = [None if end is None else self._share(end) for end in (found.low, found.high)]
        return Interval(self._share(found.mean), *(ends if self._share(1) > 0 else reversed(ends)))

    @property
    def reductions(self) -> list[float]:
        """The same, one per seed."""
        return [self._share(value) for value in self.test.values] if self._can_be_reduced else []

    @property
    def _can_be_reduced(self) -> bool:
        return self.metric in IN_NATS or self.error > 0

    def _share(self, difference: float) -> float:
        if self.metric in IN_NATS:
            return -100 * math.expm1(difference)
        return (100 if self.test.higher_is_better else -100) * difference / self.error

    @property
    def budget(self) -> str:
        """Epochs and time relative to the second line; ``equal epochs`` if they are."""
        epochs, seconds = f"{self.epochs:.2f}× epochs", ""
        if abs(self.epochs - 1) <= SAME_DATA:
            epochs = "equal epochs"
        if self.seconds is not None:
            seconds = f"{self.seconds:.2f}× time"
            seconds += f" ({self.jobs} runs at once)" if self.jobs > 1 else ""
        return ", ".join(filter(None, (epochs, seconds)))


def contrast(a: pd.DataFrame, b: pd.DataFrame) -> Contrast | None:
    """Compare the rows of two lines; None if they have no seed in common."""
    pairs = finite(a).merge(finite(b), on="seed", suffixes=("_a", "_b"))
    if pairs.empty:
        return None
    up = bool(pairs.higher_is_better_a.iloc[0])
    pairs = pairs.set_index("seed")
    test = paired_difference(pairs.test_b.to_dict(), pairs.test_a.to_dict(), up)
    valid = None
    if pairs[["valid_a", "valid_b"]].notna().all(axis=None):
        valid = paired_difference(pairs.valid_b.to_dict(), pairs.valid_a.to_dict(), up)
    assert test is not None
    places = pd.concat([pairs[f"device_{x}"] + pairs[f"jobs_{x}"].astype(str) for x in "ab"])
    timed = places.nunique() == 1
    total = pairs[["epochs_a", "epochs_b", "seconds_a", "seconds_b"]].sum()
    return Contrast(
        test,
        valid,
        one_commit=_of_one_commit(pairs.commit_a, pairs.commit_b),
        epochs=total.epochs_a / total.epochs_b if total.epochs_b else 1.0,
        seconds=total.seconds_a / total.seconds_b if timed and total.seconds_b else None,
        jobs=int(pairs.jobs_a.iloc[0]),
        error=float(errors(pairs.test_b, up).mean()),
        metric=str(pairs.metric_b.iloc[0]),
    )


def _of_one_commit(a: pd.Series, b: pd.Series) -> int | None:
    named = (a != "") | (b != "")
    return int(((a == b) & named).sum()) if named.any() else None


def finite(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows.test.abs() < float("inf")]


def errors(values: pd.Series, higher_is_better: bool) -> pd.Series:
    """What is wrong: 100 − score for scores in percent, the metric itself where lower is better."""
    return 100 - values if higher_is_better else values


def pooled_reduction(contrasts: Sequence[Contrast]) -> Interval | None:
    """The mean relative reduction over tasks, each of which counts the same; no task is chosen."""
    known = [found for found in contrasts if found.reductions]
    if len(known) == 1:
        return known[0].reduction
    return mean_of_groups([found.reductions for found in known]) if known else None
