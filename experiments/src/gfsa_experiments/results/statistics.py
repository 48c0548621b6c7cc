"""Whether one method differs from another over paired seeds.

Runs with the same seed share data order and initial weights, so the statistic is the difference
``d_s = method_s − plain_s`` of each seed ``s`` that both have. With ``n`` such seeds the interval
is Student's,

    mean(d) ± t(0.975, n − 1) · std(d) / √n ,

with the sample standard deviation (n − 1 in its denominator), and p is the two-sided p value of
the hypothesis that the mean difference is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

LEVEL = 0.95

Verdict = Literal["better", "worse", "no difference shown"]


@dataclass(frozen=True)
class PairedDifference:
    """``method − plain`` over the seeds that both have."""

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    """One difference per seed, in the metric's own unit and sign."""
    higher_is_better: bool
    low: float | None
    """The interval's ends; None with fewer than two seeds, or if the differences do not vary."""
    high: float | None
    p: float | None

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def seeds_better(self) -> int:
        """Number of seeds on which the method is strictly better."""
        return sum(v > 0 if self.higher_is_better else v < 0 for v in self.values)

    @property
    def verdict(self) -> Verdict | None:
        """``no difference shown`` if 0 is in the interval; None without an interval."""
        if self.low is None or self.high is None:
            return None
        if self.low <= 0 <= self.high:
            return "no difference shown"
        return "better" if (self.low > 0) == self.higher_is_better else "worse"


def paired_difference(
    plain: Mapping[int, float], method: Mapping[int, float], higher_is_better: bool
) -> PairedDifference | None:
    """Compare two ``{seed: value}``; None if they have no seed in common."""
    seeds = tuple(sorted(plain.keys() & method.keys()))
    if not seeds:
        return None
    values = tuple(method[seed] - plain[seed] for seed in seeds)
    low = high = p = None
    if len(values) > 1 and _vary(values, [*plain.values(), *method.values()]):
        from scipy.stats import ttest_rel

        test = ttest_rel([method[seed] for seed in seeds], [plain[seed] for seed in seeds])
        low, high = map(float, test.confidence_interval(LEVEL))
        p = float(test.pvalue)
    return PairedDifference(seeds, values, higher_is_better, low, high, p)


def _vary(differences: Sequence[float], values: Sequence[float]) -> bool:
    """Whether the differences vary by more than the rounding error of their subtraction."""
    rounding = 4 * math.ulp(max(abs(value) for value in values))
    return max(differences) - min(differences) > rounding


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: ``p'_(i) = max over j ≤ i of min(1, (m − j + 1)·p_(j))``.

    If everything with p' < 0.05 is called a difference, the probability of a false call among the
    m comparisons stays below 0.05.
    """
    order = sorted(range(len(ps)), key=lambda index: ps[index])
    adjusted = [1.0] * len(ps)
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = running
    return adjusted
