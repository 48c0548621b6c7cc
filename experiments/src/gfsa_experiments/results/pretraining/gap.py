"""The gap to plain against tokens per parameter: paired by seed, fitted, with its uncertainty.

With x tokens per parameter the two curves that are fitted are

    gap(x) = a·x^(−b)         which goes to zero, and
    gap(x) = f + a·x^(−b)     which goes to the floor f.

Squared errors in nats are minimised, each times the pairs of its cell: pairs of all lengths are
taken to have one standard deviation s, so that a mean of n has the standard error s/√n. Intervals
are percentiles over resampled seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gfsa_experiments.results.pretraining.arms import PLAIN, by_size
from gfsa_experiments.results.statistics import LEVEL, Interval, paired_difference

Numbers = NDArray[np.float64]

DRAWS = 4000
DECAYS = np.linspace(0.0, 3.0, 121)
"""The values of b that are tried."""
# a term that decays slower than this cannot be told from a floor
_DECAYS_ABOVE_FLOOR = DECAYS[DECAYS >= 0.2]
POINTS = 3
"""Different numbers of tokens per parameter that a fit needs; one more with a floor."""
OWN_SPREAD = 4
"""Seeds of a cell whose own spread is believed."""


@dataclass(frozen=True)
class Cell:
    """The differences of one size at one number of tokens, by seed."""

    size: str
    tokens: int
    ratio: float
    """Tokens per parameter."""
    seeds: tuple[int, ...]
    gaps: tuple[float, ...]
    interval: Interval

    @property
    def mean(self) -> float:
        return self.interval.mean


def cells(runs: pd.DataFrame, arm: str, metric: str = "test") -> list[Cell]:
    """``arm − plain`` wherever both saw as many tokens with one seed; sizes in order."""
    found = []
    for size in by_size(runs) if len(runs) else []:
        of_size = runs[runs["size"] == size]
        for tokens, own in of_size.groupby("tokens"):
            plain, filtered = (_by_seed(own, name, metric) for name in (PLAIN, arm))
            difference = paired_difference(plain, filtered, higher_is_better=False)
            if difference is None:
                continue
            ratio = float(own[own.arm == PLAIN].ratio.iloc[0])
            found.append(
                Cell(
                    size,
                    int(tokens),
                    ratio,
                    difference.seeds,
                    difference.values,
                    difference.interval,
                )
            )
    return found


def of_smallest(found: Sequence[Cell]) -> list[Cell]:
    """The cells of the smallest size, which the curves are fitted to.

    At as many tokens a parameter sizes differ (``pretrain-scaling-110m.txt``), so that a curve
    over tokens per parameter is one of a single size.
    """
    return [cell for cell in found if cell.size == found[0].size]


def _by_seed(runs: pd.DataFrame, arm: str, metric: str) -> dict[int, float]:
    own = runs[runs.arm == arm]
    return {int(seed): float(loss) for seed, loss in zip(own.seed, own[metric], strict=True)}


@dataclass(frozen=True)
class GapFit:
    """``gap(x) = a·x^(−b)``."""

    scale: float
    decay: float
    draws: Numbers | None
    """``(draws, 2)``: scale and decay of resampled seeds; None if no cell has two seeds."""
    floor: Interval | None
    """Of the curve with a floor; None if there are too few points for it."""

    def at(self, ratio: float) -> Interval:
        """The gap at ``ratio`` tokens per parameter."""
        mean = self.scale * ratio**-self.decay
        if self.draws is None:
            return Interval(mean)
        return Interval(mean, *_ends(self.draws[:, 0] * ratio ** -self.draws[:, 1]))


def fit_gap(found: Sequence[Cell], draws: int = DRAWS, seed: int = 0) -> GapFit | None:
    """The fit to these cells; None with fewer than :data:`POINTS` different ratios."""
    if not _enough(found, POINTS):
        return None
    ratios = np.array([cell.ratio for cell in found])
    means = np.array([cell.mean for cell in found])
    weights = _weights(found)
    scale, _, decay = _power_law(ratios, means[None], weights, floor=False)[0]
    resampled = resampled_means(found, draws, np.random.default_rng(seed))
    drawn = floor = None
    if resampled is not None:
        drawn = _power_law(ratios, resampled, weights, floor=False)[:, [0, 2]]
    if _enough(found, POINTS + 1):
        middle = float(_power_law(ratios, means[None], weights, floor=True)[0, 1])
        floor = Interval(middle)
        if resampled is not None:
            ends = _ends(_power_law(ratios, resampled, weights, floor=True)[:, 1])
            floor = Interval(middle, *ends)
    return GapFit(float(scale), float(decay), drawn, floor)


def _enough(found: Sequence[Cell], points: int) -> bool:
    # cells within a tenth of each other are one point of the curve
    ratios = sorted(cell.ratio for cell in found)
    different = sum(
        1 for low, high in zip([0.0, *ratios], ratios, strict=False) if high > 1.1 * low
    )
    return different >= points


def _weights(found: Sequence[Cell]) -> Numbers:
    """Of squared errors: the pairs whose mean the gap is."""
    return np.array([float(len(cell.gaps)) for cell in found])


def resampled_means(
    found: Sequence[Cell], draws: int, random: np.random.Generator
) -> Numbers | None:
    """``(draws, cells)``: means of seeds drawn with replacement; None if no cell has two seeds.

    Deviations from a cell's mean are taken times √(n/(n − 1)), so that the variance of a mean is
    unbiased, and times t/z of the pooled degrees of freedom, as in Student's interval. A cell with
    fewer than :data:`OWN_SPREAD` seeds takes the deviations of all cells: those of two or three
    seeds say little about the spread.
    """
    from scipy.stats import norm, t

    freedom = sum(len(cell.gaps) - 1 for cell in found)
    if not freedom:
        return None
    quantile = (1 + LEVEL) / 2
    correction = float(t.ppf(quantile, freedom) / norm.ppf(quantile))
    own = {
        at: (np.array(cell.gaps) - cell.mean) * np.sqrt(len(cell.gaps) / (len(cell.gaps) - 1))
        for at, cell in enumerate(found)
        if len(cell.gaps) > 1
    }
    pooled = np.concatenate(list(own.values()))
    columns = []
    for at, cell in enumerate(found):
        seeds = len(cell.gaps)
        drawn = random.choice(own[at] if seeds >= OWN_SPREAD else pooled, (draws, seeds))
        columns.append(cell.mean + correction * drawn.mean(1))
    return np.stack(columns, 1)


def _power_law(x: Numbers, y: Numbers, weights: Numbers, floor: bool) -> Numbers:
    """``(rows, 3)``: a, f and b of least weighted squares for each row of ``y (rows, cells)``.

    For each decay b of a grid the curve is linear in a and f.
    """
    decays = _DECAYS_ABOVE_FLOOR if floor else DECAYS
    best = np.full(len(y), np.inf)
    result = np.zeros((len(y), 3))
    for decay in decays:
        columns = [x**-decay, np.ones_like(x)] if floor else [x**-decay]
        basis = np.stack(columns, 1) * np.sqrt(weights)[:, None]
        target = y * np.sqrt(weights)
        solved = np.linalg.lstsq(basis, target.T, rcond=None)[0].T
        errors = ((target - solved @ basis.T) ** 2).sum(1)
        better = errors < best
        best[better] = errors[better]
        result[better, 0] = solved[better, 0]
        result[better, 1] = solved[better, 1] if floor else 0.0
        result[better, 2] = decay
    return result


def _ends(values: Numbers) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
