"""The figure of the page: loss by tokens and by time, the gap by tokens per parameter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gfsa.lens.colours import COLOURS, MARKERS, series_of
from gfsa_experiments.results.pretraining.arms import PLAIN, by_size, longest_compared
from gfsa_experiments.results.pretraining.gap import Cell, cells, fit_gap, of_smallest
from gfsa_experiments.results.pretraining.ladder import draw_ladder
from gfsa_experiments.results.pretraining.passing import gaps_on_the_way, passings
from gfsa_experiments.results.pretraining.speeds import speed_at
from gfsa_experiments.results.pretraining.study import Study
from gfsa_experiments.results.statistics import PairedDifference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ARMS = (PLAIN, "degree 1", "GFSA")
"""What is drawn; the other arms are in tables."""
_STYLES = ("-", "--", ":")
_RATIOS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def draw(
    study: Study, speeds: Mapping[tuple[str, str, int], float], tuning: pd.DataFrame | None
) -> Figure:
    """The four panels; one without data says what is missing.

    Args:
        tuning: the rows of the runs by which the plain model was tuned.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.4), layout="constrained")
    (by_tokens, by_time), (gaps, ladder) = figure.subplots(2, 2)
    _loss_panels(study, speeds, by_tokens, by_time)
    _gap_panel(study, gaps)
    if tuning is None or tuning.empty:
        _nothing(ladder, "no rows of tuning runs")
    else:
        draw_ladder(tuning, ladder)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write an SVG; the same rows give the same file."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "gfsa"}):
        figure.savefig(path, metadata={"Date": None})


def colours_of(arms: list[str]) -> dict[str, int]:
    """The number of each arm's colour; plain's is never given to another."""
    names = list(dict.fromkeys([PLAIN, *arms]))
    return dict(zip(names, series_of(names), strict=True))


def _loss_panels(
    study: Study, speeds: Mapping[tuple[str, str, int], float], by_tokens: Axes, by_time: Axes
) -> None:
    """Each size's longest length that plain has, mean over seeds."""
    runs, numbers = study.runs, colours_of(list(ARMS))
    unmeasured, batches = [], set[int]()
    for style, size in zip(_STYLES * 9, by_size(runs) if len(runs) else [], strict=False):
        own = runs[runs["size"] == size]
        tokens = longest_compared(own)
        own = own[own.tokens == tokens]
        # runs of another length may have other batches
        batch = int(own.batch_size.iloc[0])
        for arm in ARMS:
            seeds = own[own.arm == arm].seed
            curve = mean_curve(study.curves, size, arm, tokens, set(seeds))
            if curve is None:
                continue
            look: dict[str, Any] = {"color": COLOURS[numbers[arm]], "linestyle": style}
            label = f"{arm}, {size}: {curve.iloc[-1]:.3f}"
            by_tokens.plot(curve.index / 1e6, curve, label=label, **look)
            speed = speed_at(speeds, size, arm, batch)
            if speed is None:
                unmeasured.append(f"{arm} at {size}")
            else:
                by_time.plot(curve.index / speed[0], curve, **look)
                batches.add(speed[1])
    if not by_tokens.lines:
        for axis in (by_tokens, by_time):
            _nothing(axis, "no curve of a planned run yet")
        return
    for axis, label in ((by_tokens, "tokens (millions)"), (by_time, "GPU seconds, alone on it")):
        lowest = min(float(np.min(line.get_ydata())) for line in by_tokens.lines)
        axis.set(xlabel=label, ylabel="validation loss (nats)", ylim=(lowest - 0.1, lowest + 1.5))
    by_tokens.legend(frameon=False, fontsize="small")
    by_tokens.set_title("the longest runs of each size, means over seeds", fontsize=9)
    if batches:
        at = " and ".join(map(str, sorted(batches)))
        by_time.set_title(f"time of a token as measured at batches of {at}", fontsize=9)
    if unmeasured:
        # curves fall from the left: a narrow text at the right is beside them
        text = "\n".join(["time of a token\nnot measured:", *unmeasured])
        look = {"ha": "right", "va": "top", "fontsize": 7, "transform": by_time.transAxes}
        behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        by_time.text(0.98, 0.97, text, bbox=behind, **look)


def mean_curve(
    curves: pd.DataFrame, size: str, arm: str, tokens: int, seeds: set[int]
) -> pd.Series | None:
    """The mean over seeds of curves that end after ``tokens``; None if there is none."""
    own = curves[(curves["size"] == size) & (curves.arm == arm) & curves.seed.isin(seeds)]
    if own.empty:
        return None
    own = own.astype({"tokens": int, "valid loss": float})
    ends = own.groupby(["options", "settings", "seed"]).tokens.transform("max")
    mean: pd.Series = own[ends == tokens].groupby("tokens")["valid loss"].mean()
    return mean if len(mean) else None


def _gap_panel(study: Study, axis: Axes) -> None:
    """The difference to plain: of the longest runs on their way, and at the end of every run."""
    numbers = colours_of(list(ARMS))
    by_arm = {arm: cells(study.runs, arm, "valid") for arm in ARMS[1:]}
    if not any(by_arm.values()):
        _nothing(axis, "no pair of planned runs yet")
        return
    untuned = {
        (one.size, one.tokens)
        for one in passings(study.curves, study.runs)
        if one.shows_untuned_plain
    }
    lowest = min(cell.mean for found in by_arm.values() for cell in found)
    highest = max(
        (cell.interval.high or 0.0 for found in by_arm.values() for cell in found), default=0.0
    )
    is_fitted = False
    for at_arm, (arm, found) in enumerate(by_arm.items()):
        colour = COLOURS[numbers[arm]]
        tuned = [cell for cell in found if (cell.size, cell.tokens) not in untuned]
        is_fitted |= _draw_fit(axis, of_smallest(tuned), colour)
        for at, size in enumerate(dict.fromkeys(cell.size for cell in found)):
            way = gaps_on_the_way(study.curves, study.runs, size)
            _draw_way(axis, way, arm, colour, _STYLES[at % len(_STYLES)])
            own = [cell for cell in found if cell.size == size]
            fair = [cell for cell in own if (cell.size, cell.tokens) not in untuned]
            # two arms have the same lengths: beside each other, and not one on the other
            aside = 0.97 + 0.06 * at_arm
            look: dict[str, Any] = {"color": colour, "marker": MARKERS[at], "aside": aside}
            _draw_cells(axis, fair, f"{arm}, {size}", **look)
            rest = [cell for cell in own if cell not in fair]
            _draw_cells(axis, rest, "", hollow=True, **look)
    axis.axhline(0, color=COLOURS[numbers[PLAIN]], label=PLAIN)
    axis.set_xscale("log")
    left, right = axis.get_xlim()
    ticks = [tick for tick in _RATIOS if left / 2 <= tick <= 2 * right]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    title = "marks: ends of runs; lines: the longest runs on their way; 95 % over seeds"
    if is_fitted:
        title += "\nthin: a·x^−b fitted to the smallest size, each mark weighted by its pairs"
    if untuned:
        title += "\nhollow: plain is not tuned there (its longest runs pass it lower)"
    axis.set(
        xlim=(min(ticks) / 1.2, max(ticks) * 1.2),
        # intervals of two seeds may be wider than the panel
        ylim=(
            min(1.4 * lowest, -0.02),
            min(max(0.15 * abs(lowest), 1.1 * highest), abs(lowest)) + 0.01,
        ),
        xlabel="tokens per parameter",
        ylabel="validation loss − plain (nats)",
        title=title,
    )
    axis.title.set_fontsize(8)
    axis.legend(frameon=False, fontsize="small", loc="lower right")


def _draw_way(
    axis: Axes,
    way: Mapping[float, Mapping[str, PairedDifference]],
    arm: str,
    colour: str,
    style: str,
) -> None:
    """The gap of one arm at the validations of its longest runs, with the band of its interval."""
    known = {ratio: gaps[arm].interval for ratio, gaps in way.items() if arm in gaps}
    axis.plot(list(known), [gap.mean for gap in known.values()], color=colour, linestyle=style)
    if known and all(gap.low is not None for gap in known.values()):
        low, high = zip(*((gap.low, gap.high) for gap in known.values()), strict=True)
        axis.fill_between(list(known), low, high, color=colour, alpha=0.15, linewidth=0)


def _draw_fit(axis: Axes, found: list[Cell], colour: str) -> bool:
    """The fitted curve over the lengths that it is fitted to; False without a fit."""
    fit = fit_gap(found, draws=1)
    if fit is None:
        return False
    ratios = [cell.ratio for cell in found]
    x = np.geomspace(min(ratios), max(ratios), 50)
    axis.plot(x, fit.scale * x**-fit.decay, color=colour, linestyle="-.", linewidth=0.8, zorder=1)
    return True


def _draw_cells(
    axis: Axes,
    own: list[Cell],
    label: str,
    color: str,
    marker: str,
    aside: float,
    hollow: bool = False,
) -> None:
    """The means of one arm and size, with their intervals."""
    if not own:
        return
    ratios = [aside * cell.ratio for cell in own]
    ends = [
        (cell.interval.low, cell.interval.high)
        if cell.interval.low is not None and cell.interval.high is not None
        else (cell.mean, cell.mean)
        for cell in own
    ]
    axis.vlines(ratios, *zip(*ends, strict=True), color=color, linewidth=1)
    look: dict[str, Any] = {"color": color, "marker": marker, "linestyle": "none"}
    if hollow:
        look["markerfacecolor"] = "white"
    axis.plot(ratios, [cell.mean for cell in own], label=label or None, **look)


def _nothing(axis: Axes, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)
    axis.set_axis_off()
