"""Arms × seeds: every control against GFSA and against plain, with one pooled spread.

The loss of arm i with seed j is taken to be ``arm_i + seed_j + error``, with errors of one standard
deviation. Over k arms that all have the same n seeds a difference of two arms has the interval

    mean_i − mean_l ± t(0.975, (k − 1)(n − 1)) · s · √(2/n) ,

s² being the sum of squared residuals over its (k − 1)(n − 1) degrees of freedom.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from gfsa_experiments.results.pretraining.arms import PLAIN, arms_of, settings_apart
from gfsa_experiments.results.statistics import LEVEL, Interval

GFSA = "GFSA"


@dataclass(frozen=True)
class Controls:
    """The table; arms that lack a seed of the others are not in it."""

    means: dict[str, float]
    """Test loss by arm."""
    seeds: tuple[int, ...]
    half: float | None
    """Half the width of every interval; None with one seed."""
    spread: float | None
    """s, the standard deviation of one run."""
    freedom: int

    def difference(self, arm: str, to: str) -> Interval | None:
        """``arm − to``; None if either is not in the table, or if they are the same."""
        if arm == to or not {arm, to} <= self.means.keys():
            return None
        mean = self.means[arm] - self.means[to]
        return (
            Interval(mean)
            if self.half is None
            else Interval(mean, mean - self.half, mean + self.half)
        )


def named(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with arms of their own for models that train longer, or are set otherwise."""
    usual = runs.tokens.min()
    longer = [
        arm if tokens == usual else f"{arm}, {tokens / usual:.2f} times the steps"
        for arm, tokens in zip(runs.arm, runs.tokens, strict=True)
    ]
    found = runs.assign(arm=longer)
    common = found.settings.value_counts()
    names: dict[tuple[str, str], str] = {}
    for arm, own in found.groupby("arm"):
        apart = settings_apart(own.settings.unique())
        # one of them keeps the name: the one that is set as most runs of the other arms are
        first = max(apart, key=lambda text: common[text])
        names |= {
            (str(arm), text): f"{arm}, {words}" for text, words in apart.items() if text != first
        }
    pairs = zip(found.arm, found.settings, strict=True)
    return found.assign(arm=[names.get(pair, pair[0]) for pair in pairs])


def controls(runs: pd.DataFrame) -> Controls | None:
    """The table of runs of one size; None without two arms that have a seed in common."""
    if runs.empty or runs.test.isna().all():
        return None
    finite = runs[runs.test.notna()]
    table = named(finite).pivot(index="arm", columns="seed", values="test")
    # an arm of which a run is missing leaves, and not the seed of all the others
    most = table.notna().sum(axis=1).max()
    table = table[table.notna().sum(axis=1) == most].dropna(axis=1)
    k, n = table.shape
    if k < 2 or n < 1:
        return None
    freedom = (k - 1) * (n - 1)
    spread = half = None
    if freedom:
        from scipy.stats import t

        values = table.to_numpy(float)
        residuals = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
        spread = float(np.sqrt((residuals**2).sum() / freedom))
        half = float(t.ppf((1 + LEVEL) / 2, freedom) * spread * np.sqrt(2 / n))
    order = arms_of(table.reset_index())
    means = {arm: float(table.loc[arm].mean()) for arm in order}
    return Controls(means, tuple(int(seed) for seed in table.columns), half, spread, freedom)


@dataclass(frozen=True)
class Rates:
    """The validation losses of one arm by learning rate."""

    arm: str
    losses: dict[float, float]
    """NaN where the run broke down."""

    @property
    def best(self) -> float | None:
        known = {rate: loss for rate, loss in self.losses.items() if not np.isnan(loss)}
        return min(known, key=lambda rate: known[rate]) if known else None

    @property
    def is_at_edge(self) -> bool:
        """Whether a rate beyond those that were tried could give a lower loss."""
        return self.best in (min(self.losses), max(self.losses))


def rates(runs: pd.DataFrame) -> list[Rates]:
    """Every arm of runs that differ in their learning rate alone."""
    found = []
    for arm in arms_of(runs):
        own = runs[runs.arm == arm].sort_values("lr")
        losses = {float(lr): float(loss) for lr, loss in zip(own.lr, own.valid, strict=True)}
        found.append(Rates(arm, losses))
    return found


def compared(found: Controls) -> list[str]:
    """The arms that are compared with GFSA and plain."""
    return [arm for arm in found.means if arm not in (PLAIN, GFSA)]
