"""What an arm is worth in steps of plain: how much longer plain would train for the same loss.

Plain's loss is taken to fall by a constant for each factor of steps, which two lengths of plain
with the same seeds tell. With g the gain of the arm over plain and l that of plain's longer runs,
which have r times the steps, the arm is worth ``r^(g/l)`` times plain's steps. The interval of the
ratio of the two paired means is Fieller's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from gfsa_experiments.results.number_format import Scale
from gfsa_experiments.results.pretraining.arms import PLAIN
from gfsa_experiments.results.statistics import LEVEL, Interval, paired_difference

STEP_TIMES = {"GFSA": 1.06}
"""With today's kernels at widths of 512 and 768, relative to plain (results/kernels.md: 1.05 to
1.07); a step of degree 1 takes no longer than plain's."""


@dataclass(frozen=True)
class Worth:
    """An arm against plain's runs of its own length and plain's next longer ones."""

    size: str
    arm: str
    tokens: int
    longer: float
    """How many times as long plain's longer runs are."""
    gains: tuple[float, ...]
    """Plain − arm by seed."""
    gains_of_longer: tuple[float, ...]
    """Plain − longer plain by the same seeds."""

    @property
    def steps(self) -> Interval | None:
        """Plain's steps for the arm's loss as a multiple; None unless longer training helps."""
        ratio = _ratio_of_means(self.gains, self.gains_of_longer)
        if ratio is None or ratio.low is None or ratio.high is None:
            return None
        return Interval(*(self.longer**value for value in (ratio.mean, ratio.low, ratio.high)))

    def gap_at_equal_time(self, step_time: float) -> Interval:
        """Arm − plain, were plain trained for the time of the arm's steps.

        Args:
            step_time: the arm's time of a step as a multiple of plain's.
        """
        share = math.log(step_time) / math.log(self.longer)
        plain = {at: -share * gain for at, gain in enumerate(self.gains_of_longer)}
        arm = {at: -gain for at, gain in enumerate(self.gains)}
        pair = paired_difference(plain, arm, higher_is_better=False)
        assert pair is not None
        return pair.interval


def worth(runs: pd.DataFrame, arm: str, size: str) -> Worth | None:
    """The arm's longest runs of a size; None without longer ones of plain and two shared seeds."""
    own = runs[runs["size"] == size]
    if own[own.arm == arm].empty:
        return None
    tokens = int(own[own.arm == arm].tokens.max())
    plain = own[own.arm == PLAIN]
    more = plain[plain.tokens > tokens].tokens
    if more.empty:
        return None
    columns = {
        "arm": own[(own.arm == arm) & (own.tokens == tokens)],
        "plain": plain[plain.tokens == tokens],
        "longer": plain[plain.tokens == more.min()],
    }
    table = pd.DataFrame({name: part.set_index("seed").test for name, part in columns.items()})
    table = table.dropna().sort_index()
    if len(table) < 2:
        return None
    return Worth(
        size,
        arm,
        tokens,
        float(more.min()) / tokens,
        tuple(table.plain - table.arm),
        tuple(table.plain - table.longer),
    )


def worth_sentences(found: Sequence[Worth]) -> list[str]:
    """One sentence for each size, and what is left of the gap at equal time."""
    by_size: dict[str, list[Worth]] = {}
    for one in found:
        by_size.setdefault(one.size, []).append(one)
    said = []
    for size, own in by_size.items():
        parts = [f"{one.arm} {_more(one.steps)}" for one in own]
        text = (
            f"{size}, {own[0].tokens / 1e6:.0f}M tokens, worth in more steps of plain, if its loss "
            f"falls alike with every factor of steps (known from {own[0].longer:.2f} times the "
            f"steps, {len(own[0].gains)} seeds; extrapolated beyond): {', '.join(parts)}."
        )
        for one in own:
            if one.arm in STEP_TIMES:
                factor = STEP_TIMES[one.arm]
                left = one.gap_at_equal_time(factor)
                shown = "suggestive" if left.excludes_zero else "not shown"
                text += (
                    f" At equal time {one.arm} − plain would be {Scale(1, 3).interval(left)}, "
                    f"{shown}, if its step took {factor} times plain's, as it does now at widths "
                    "of 512 and 768 ([kernels](kernels.md)); estimated, not run."
                )
        said.append(text)
    return said


def _more(steps: Interval | None) -> str:
    if steps is None or steps.low is None or steps.high is None:
        return "not known (longer training is not shown to help plain)"
    mean, low, high = (100 * (value - 1) for value in (steps.mean, steps.low, steps.high))
    return f"{mean:.0f} % ({low:.0f} … {high:.0f})".replace("-", "−")


def _ratio_of_means(above: tuple[float, ...], below: tuple[float, ...]) -> Interval | None:
    """Fieller's interval of mean(above)/mean(below), paired; None if mean(below) may be 0."""
    from scipy.stats import t

    count = len(above)
    means = float(np.mean(above)), float(np.mean(below))
    covariance = np.cov(above, below) / count * t.ppf((1 + LEVEL) / 2, count - 1) ** 2
    # the ratios q for which the mean of above − q·below is not significant
    a = means[1] ** 2 - covariance[1, 1]
    b = means[0] * means[1] - covariance[0, 1]
    c = means[0] ** 2 - covariance[0, 0]
    if a <= 0 or means[1] <= 0:
        return None
    root = math.sqrt(max(0.0, b * b - a * c))
    return Interval(means[0] / means[1], float((b - root) / a), float((b + root) / a))
