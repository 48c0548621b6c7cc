"""What the fit of the gap says, in sentences: its law, and whether the gap vanishes."""

from __future__ import annotations

import numpy as np
import pandas as pd

from gfsa_experiments.results.number_format import Scale, signed
from gfsa_experiments.results.pretraining.gap import (
    DECAYS,
    POINTS,
    Cell,
    GapFit,
    cells,
    fit_gap,
    of_smallest,
)
from gfsa_experiments.results.statistics import LEVEL

NATS = Scale(1, 3)
FITTED = ("degree 1", "GFSA")
"""The arms whose gap is fitted."""


def fit_sentence(arm: str, found: list[Cell]) -> str:
    """What the fit to the smallest size says of whether the gap vanishes, or why there is none."""
    found = of_smallest(found)
    fit = fit_gap(found)
    if fit is None:
        there = ", ".join(f"{cell.ratio:.1f}" for cell in found) or "none"
        return (
            f"{arm} − plain: no fit. It needs {POINTS} numbers of tokens per parameter that differ "
            "by a tenth or more, each with a tuned plain model; there "
            f"{'are' if len(found) > 1 else 'is'} {there}."
        )
    most = max(cell.ratio for cell in found)
    law = f"{signed(fit.scale, 3)}·x^{signed(-fit.decay, 2)}"
    text = (
        f"{arm} − plain at {found[0].size}, fitted by {law}{_powers(fit)} over x tokens per "
        f"parameter (least squares, each length weighted by its pairs: {_pairs(found)}): "
        f"{NATS.interval(fit.at(most))} at {most:.1f}, the most that was run. {_vanishes(fit)}"
    )
    if fit.decay in (DECAYS[0], DECAYS[-1]):
        text += f" No power beyond {signed(-fit.decay, 2)} was tried."
    miss = max(found, key=lambda cell: abs(cell.mean - fit.at(cell.ratio).mean))
    far = miss.mean - fit.at(miss.ratio).mean
    if round(far, 3):
        text += f" It misses most at {miss.ratio:.1f}, by {signed(far, 3)}."
    return text


def _pairs(found: list[Cell]) -> str:
    """``2, 2, 6 and 6``, in the order of the table above the fit."""
    *others, last = (str(len(cell.gaps)) for cell in found)
    return f"{', '.join(others)} and {last}"


def _powers(fit: GapFit) -> str:
    """The 95 % interval of the power, within what was tried."""
    if fit.draws is None:
        return ""
    ends = np.percentile(-fit.draws[:, 1], [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    low, high = (signed(float(end) + 0.0, 2) for end in ends)
    return f" (power {low} … {high})"


def vanishing(runs: pd.DataFrame) -> str:
    """One sentence for the first page: does the gap vanish with more tokens?

    Args:
        runs: those with a tuned plain model.
    """
    by_arm = {arm: of_smallest(cells(runs, arm)) for arm in FITTED} if len(runs) else {}
    fits = {arm: fit_gap(found) for arm, found in by_arm.items()}
    floors = {arm: fit.floor for arm, fit in fits.items() if fit is not None and fit.floor}
    head = "**Does the gap vanish with more tokens?**"
    if not floors:
        return f"{head} Not known: there are too few lengths for a curve with a floor."
    fitted = [cell for arm in floors for cell in by_arm[arm]]
    ratios = [cell.ratio for cell in fitted]
    read = " and ".join(f"{NATS.interval(floor)} for {arm}" for arm, floor in floors.items())
    stays = [arm for arm, floor in floors.items() if floor.excludes_zero]
    answer = "Not known" if not stays else f"Not within the fit of {' and '.join(stays)}"
    inside = "" if stays else f", {'each ' if len(floors) > 1 else ''}with 0 in it"
    if any(floor.low is None for floor in floors.values()):
        inside = ", without an interval"
    return (
        f"{head} {answer}: at {fitted[0].size}, over {min(ratios):.1f} to {max(ratios):.1f} tokens "
        f"per parameter, a curve with a floor has it at {read}{inside} (exploratory, "
        "[fits](pretraining-details.md#the-gap-by-tokens-per-parameter)). Nothing was run beyond."
    )


def _vanishes(fit: GapFit) -> str:
    """Whether a floor is needed; a gap that is fitted to go to zero proves nothing."""
    if fit.floor is None:
        return (
            f"Whether it goes to zero cannot be asked of fewer than {POINTS + 1} points: this "
            "curve does by construction."
        )
    floor = f"a curve with a floor has it at {NATS.interval(fit.floor)}"
    if fit.floor.low is None:
        return f"Does it vanish? Not known: {floor}, without an interval (no cell has two seeds)."
    if not fit.floor.excludes_zero:
        return f"Does it vanish? Not known: {floor}, which has 0 in it."
    side = "below" if fit.floor.mean < 0 else "above"
    if (fit.floor.mean < 0) == (fit.scale < 0):
        return f"Does it vanish? Not within this fit: {floor}, {side} 0."
    return f"Does it vanish? It turns: {floor}, {side} 0."
