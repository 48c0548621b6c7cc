"""Whether one method differs from another over paired seeds, and by how much.

Runs with the same seed share data order and initial weights, so the statistic is the difference
``d_s = a_s − b_s`` of each seed ``s`` that both have. The interval is Student's,

    mean(d) ± t(0.975, n − 1) · std(d) / √n ,

and p is the two-sided p value of the hypothesis that the mean difference is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

LEVEL = 0.95
# for these metrics the reduction of the perplexity, exp(loss), is reported
IN_NATS = {"loss"}
# runs whose costs differ by no more are taken to have had the same
_SAME = 0.01


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
class PairedDifference(Interval):
    """``a − b`` over the seeds that both have, in the metric's own unit and sign.

    There is no interval with fewer than two seeds, or if the differences do not vary.
    """

    seeds: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    higher_is_better: bool = True
    p: float | None = None

    @property
    def seeds_better(self) -> int:
        """Number of seeds on which ``a`` is strictly better."""
        return sum(v > 0 if self.higher_is_better else v < 0 for v in self.values)

    @property
    def verdict(self) -> str | None:
        """``better``, ``worse`` or ``no difference shown``; None without an interval."""
        if self.low is None:
            return None
        if not self.excludes_zero:
            return "no difference shown"
        return "better" if (self.mean > 0) == self.higher_is_better else "worse"

    @property
    def reading(self) -> str | None:
        """The verdict in exploratory words: only families may say *better* or *worse*."""
        words = {"better": "suggestive", "worse": "suggestive (against)"}
        return None if self.verdict is None else words.get(self.verdict, "not shown")


def paired_difference(
    reference: Mapping[int, float], method: Mapping[int, float], higher_is_better: bool
) -> PairedDifference | None:
    """``method − reference`` of two ``{seed: value}``; None if they have no seed in common."""
    seeds = tuple(sorted(reference.keys() & method.keys()))
    if not seeds:
        return None
    values = tuple(method[seed] - reference[seed] for seed in seeds)
    low = high = p = None
    # differences that vary by no more than the rounding of their subtraction do not vary
    rounding = 4 * math.ulp(max(abs(v) for v in [*reference.values(), *method.values()]))
    if max(values) - min(values) > rounding:
        from scipy.stats import ttest_rel

        test = ttest_rel([method[seed] for seed in seeds], [reference[seed] for seed in seeds])
        low, high = map(float, test.confidence_interval(LEVEL))
        p = float(test.pvalue)
    return PairedDifference(float(np.mean(values)), low, high, seeds, values, higher_is_better, p)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: ``p'_(i) = max over j ≤ i of min(1, (m − j + 1)·p_(j))``."""
    order = np.argsort(ps, kind="stable")
    scaled = np.arange(len(ps), 0, -1) * np.asarray(ps, float)[order]
    adjusted = np.empty(len(ps))
    adjusted[order] = np.maximum.accumulate(np.minimum(scaled, 1.0))
    return [float(p) for p in adjusted]


@dataclass(frozen=True)
class Contrast:
    """``a − b`` over the seeds for which both have a finite result."""

    test: PairedDifference
    budget: str
    """Epochs and time of ``a`` relative to ``b``; times only if all runs shared a device alike."""
    error: float
    """The mean error of ``b``: 100 − score for scores in percent, the metric if lower is better."""
    metric: str

    @property
    def reduced(self) -> str:
        """What :attr:`reduction` is a share of: the metric, for a loss in nats the perplexity."""
        return "perplexity" if self.metric in IN_NATS else self.metric

    @property
    def reduction(self) -> Interval | None:
        """The relative reduction of the error in percent, positive where ``a`` is better.

        The mean error of ``b`` has no uncertainty here: the interval excludes 0 exactly where that
        of the difference does. None where ``b`` makes no error. For a loss in nats it is that of
        the perplexity, ``1 − exp(difference)``.
        """
        found, scale = self.test, 100 if self.test.higher_is_better else -100
        in_nats = self.metric in IN_NATS
        if not in_nats and self.error <= 0:
            return None

        def share(difference: float) -> float:
            return -100 * math.expm1(difference) if in_nats else scale * difference / self.error

        low, high = (None if end is None else share(end) for end in (found.low, found.high))
        ends = (low, high) if found.higher_is_better else (high, low)
        return Interval(share(found.mean), *ends)


def contrast(a: pd.DataFrame, b: pd.DataFrame) -> Contrast | None:
    """Compare the rows of two lines; None if they have no seed in common."""
    pairs = finite(a).merge(finite(b), on="seed", suffixes=("_a", "_b")).set_index("seed")
    if pairs.empty:
        return None
    up = bool(pairs.higher_is_better_a.iloc[0])
    test = paired_difference(pairs.test_b.to_dict(), pairs.test_a.to_dict(), up)
    assert test is not None
    error = 100 - pairs.test_b if up else pairs.test_b
    return Contrast(test, _budget(pairs), float(error.mean()), str(pairs.metric_b.iloc[0]))


def _budget(pairs: pd.DataFrame) -> str:
    """``1.10× epochs, 1.05× time (4 runs at once)``, or ``equal epochs``."""
    total = pairs[["epochs_a", "epochs_b", "seconds_a", "seconds_b"]].sum()
    epochs = total.epochs_a / total.epochs_b if total.epochs_b else 1.0
    said = "equal epochs" if abs(epochs - 1) <= _SAME else f"{epochs:.2f}× epochs"
    places = pd.concat([pairs[f"device_{x}"] + pairs[f"jobs_{x}"].astype(str) for x in "ab"])
    if places.nunique() == 1 and total.seconds_b:
        said += f", {total.seconds_a / total.seconds_b:.2f}× time"
        jobs = int(pairs.jobs_a.iloc[0])
        said += f" ({jobs} runs at once)" if jobs > 1 else ""
    return said


def finite(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows.test.abs() < float("inf")]
