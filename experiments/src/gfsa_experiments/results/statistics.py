"""Whether one method differs from another over paired seeds.

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

    def times(self, factor: float) -> Interval:
        ends = [None if end is None else factor * end for end in (self.low, self.high)]
        return Interval(factor * self.mean, *(ends if factor >= 0 else reversed(ends)))


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

        *Better* and *worse* are words of families (:mod:`.verdicts`), which correct for their size.
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
