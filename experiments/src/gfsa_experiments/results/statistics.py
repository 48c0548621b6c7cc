"""Whether one method differs from another over paired seeds, and by how much.

Runs with the same seed share data order and initial weights, so the statistic is the difference
``d_s = a_s − b_s`` of each seed ``s`` that both have. With ``n`` such seeds the interval is
Student's,

    mean(d) ± t(0.975, n − 1) · std(d) / √n ,

with the sample standard deviation (n − 1 in its denominator), and p is the two-sided p value of
the hypothesis that the mean difference is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

LEVEL = 0.95
# percent that were computed from equal differences may differ by so much
_ROUNDING = 1e-9

Verdict = Literal["better", "worse", "no difference shown"]
_EXPLORATORY: dict[Verdict, str] = {
    "better": "suggestive",
    "worse": "suggestive (against)",
    "no difference shown": "not shown",
}


@dataclass(frozen=True)
class Interval:
    """A mean with its interval; the ends are None where nothing is known about the spread."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class PairedDifference:
    """``a − b`` over the seeds that both have."""

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    """One difference per seed, in the metric's own unit and sign."""
    higher_is_better: bool
    interval: Interval
    """Without ends if there are fewer than two seeds, or if the differences do not vary."""
    p: float | None

    @property
    def mean(self) -> float:
        return self.interval.mean

    @property
    def low(self) -> float | None:
        return self.interval.low

    @property
    def high(self) -> float | None:
        return self.interval.high

    @property
    def seeds_better(self) -> int:
        """Number of seeds on which ``a`` is strictly better."""
        return sum(v > 0 if self.higher_is_better else v < 0 for v in self.values)

    @property
    def verdict(self) -> Verdict | None:
        """``no difference shown`` if 0 is in this one interval; None without an interval."""
        if self.low is None:
            return None
        if not self.interval.excludes_zero:
            return "no difference shown"
        return "better" if (self.mean > 0) == self.higher_is_better else "worse"

    @property
    def reading(self) -> str | None:
        """The verdict in the words of exploratory tables, ``suggestive`` or ``not shown``.

        Only families (:mod:`.families`), which correct for their size, say *better* or *worse*.
        """
        return None if self.verdict is None else _EXPLORATORY[self.verdict]


def paired_difference(
    reference: Mapping[int, float], method: Mapping[int, float], higher_is_better: bool
) -> PairedDifference | None:
    """``method − reference`` of two ``{seed: value}``; None if they have no seed in common."""
    seeds = tuple(sorted(reference.keys() & method.keys()))
    if not seeds:
        return None
    values = tuple(method[seed] - reference[seed] for seed in seeds)
    interval, p = Interval(float(np.mean(values))), None
    if len(values) > 1 and _vary(values, [*reference.values(), *method.values()]):
        from scipy.stats import ttest_rel

        test = ttest_rel([method[seed] for seed in seeds], [reference[seed] for seed in seeds])
        interval = Interval(interval.mean, *map(float, test.confidence_interval(LEVEL)))
        p = float(test.pvalue)
    return PairedDifference(seeds, values, higher_is_better, interval, p)


def _vary(differences: Sequence[float], values: Sequence[float]) -> bool:
    """Whether the differences vary by more than the rounding error of their subtraction."""
    rounding = 4 * math.ulp(max(abs(value) for value in values))
    return max(differences) - min(differences) > rounding


def mean_of_groups(groups: Sequence[Sequence[float]]) -> Interval:
    """The mean of the means of independent groups, each of which counts the same.

    With v_i = std_i²/n_i the standard error is √(Σ v_i)/m over m groups, and the degrees of freedom
    are Welch's and Satterthwaite's, (Σ v_i)² / Σ (v_i²/(n_i − 1)). A group of one value, or groups
    that do not vary, leave the interval unknown.
    """
    mean = float(np.mean([np.mean(group) for group in groups]))
    if min(map(len, groups)) < 2:
        return Interval(mean)
    largest = max(abs(value) for group in groups for value in group)
    if max(map(np.ptp, groups)) <= _ROUNDING * max(1.0, largest):
        return Interval(mean)
    v = np.array([np.var(group, ddof=1) / len(group) for group in groups])
    from scipy.stats import t

    freedom = v.sum() ** 2 / sum(v**2 / [len(group) - 1 for group in groups])
    half = float(t.ppf((1 + LEVEL) / 2, freedom) * np.sqrt(v.sum()) / len(groups))
    return Interval(mean, mean - half, mean + half)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: ``p'_(i) = max over j ≤ i of min(1, (m − j + 1)·p_(j))``.

    If everything with p' < 0.05 is called a difference, the probability of a false call among the
    m comparisons stays below 0.05.
    """
    order = np.argsort(ps, kind="stable")
    scaled = np.arange(len(ps), 0, -1) * np.asarray(ps, float)[order]
    adjusted = np.empty(len(ps))
    adjusted[order] = np.maximum.accumulate(np.minimum(scaled, 1.0))
    return [float(p) for p in adjusted]


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
