"""The figure of the page: loss by tokens and by time, the gap by tokens per parameter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gfsa.lens.colours import COLOURS, MARKERS, series_of
from gfsa_experiments.results.pretraining.arms import PLAIN, by_size
from gfsa_experiments.results.pretraining.gap import Cell, cells, fit_gap
from gfsa_experiments.results.pretraining.ladder import draw_ladder
from gfsa_experiments.results.pretraining.speeds import speed_at
from gfsa_experiments.results.pretraining.study import Study

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
        tuning: the curves of the runs by which the plain model was tuned.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.4), layout="constrained")
    (by_tokens, by_time), (gaps, ladder) = figure.subplots(2, 2)
    _loss_panels(study, speeds, by_tokens, by_time)
    _gap_panel(study, gaps)
    if tuning is None or tuning.empty:
        _nothing(ladder, "no curves of tuning runs")
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
    unmeasured = []
    for style, size in zip(_STYLES * 9, by_size(runs) if len(runs) else [], strict=False):
        own = runs[runs["size"] == size]
        # of lengths that several arms have; plain alone may have trained for longer
        shared = own.groupby("tokens").arm.nunique()
        tokens = shared[shared == shared.max()].index.max()
        own = own[own.tokens == tokens]
        # runs of another length may have other batches
        batch = int(own.batch_size.iloc[0])
        for arm in ARMS:
            seeds = own[own.arm == arm].seed
            curve = mean_curve(study.curves, size, arm, int(tokens), set(seeds))
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
    if not by_tokens.lines:
        for axis in (by_tokens, by_time):
            _nothing(axis, "no curve of a planned run yet")
        return
    for axis, label in ((by_tokens, "tokens (millions)"), (by_time, "GPU seconds, alone on it")):
        lowest = min(float(np.min(line.get_ydata())) for line in by_tokens.lines)
        axis.set(xlabel=label, ylabel="validation loss (nats)", ylim=(lowest - 0.1, lowest + 1.5))
    by_tokens.legend(frameon=False, fontsize="small")
    if unmeasured:
        text = f"time of a token not measured:\n{', '.join(unmeasured)}"
        by_time.text(
            0.97, 0.95, text, ha="right", va="top", fontsize=8, transform=by_time.transAxes
        )


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
    """The difference to plain of each size and length, with the curve that was fitted to them."""
    numbers = colours_of(list(ARMS))
    by_arm = {arm: cells(study.runs, arm) for arm in ARMS[1:]}
    if not any(by_arm.values()):
        _nothing(axis, "no pair of planned runs yet")
        return
    for arm, found in by_arm.items():
        colour = COLOURS[numbers[arm]]
        for at, size in enumerate(dict.fromkeys(cell.size for cell in found)):
            own = [cell for cell in found if cell.size == size]
            _draw_cells(axis, own, colour, MARKERS[at], label=f"{arm}, {size}")
        _draw_fit(axis, found, colour)
    axis.axhline(0, color=COLOURS[numbers[PLAIN]], label=PLAIN)
    axis.set_xscale("log")
    left, right = axis.get_xlim()
    ticks = [tick for tick in _RATIOS if left / 2 <= tick <= 2 * right]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.set(
        xlim=(min(ticks) / 1.2, max(ticks) * 1.2),
        xlabel="tokens per parameter",
        ylabel="test loss − plain (nats)",
        title="intervals and bands: 95 %, over seeds",
    )
    axis.title.set_fontsize(9)
    axis.legend(frameon=False, fontsize="small")


def _draw_cells(axis: Axes, own: list[Cell], colour: str, marker: str, label: str) -> None:
    """The means of one arm and size, with their intervals."""
    ratios = [cell.ratio for cell in own]
    ends = [
        (cell.interval.low, cell.interval.high)
        if cell.interval.low is not None and cell.interval.high is not None
        else (cell.mean, cell.mean)
        for cell in own
    ]
    axis.vlines(ratios, *zip(*ends, strict=True), color=colour, linewidth=1)
    means = [cell.mean for cell in own]
    axis.plot(ratios, means, linestyle="none", marker=marker, color=colour, label=label)


def _draw_fit(axis: Axes, found: list[Cell], colour: str) -> None:
    """The curve that was fitted to the cells of one arm, if they allow one, and its band."""
    fit = fit_gap(found)
    if fit is None:
        return
    x = np.geomspace(min(c.ratio for c in found), max(c.ratio for c in found), 60)
    curve = [fit.at(float(value)) for value in x]
    axis.plot(x, [point.mean for point in curve], color=colour, linewidth=1.4)
    if fit.draws is not None:
        low, high = zip(*((point.low, point.high) for point in curve), strict=True)
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _nothing(axis: Axes, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)
    axis.set_axis_off()
