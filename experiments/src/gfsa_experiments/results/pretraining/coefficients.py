"""The filters' coefficients over training, from the collected table: a figure and a lens page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gfsa.lens.colours import COLOURS, series_of
from gfsa.lens.trajectory import LayerTrajectory, Trajectory
from gfsa_experiments.results.pretraining.arms import PLAIN, arms_of, by_size
from gfsa_experiments.results.pretraining.collect import RUN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


def longest(coefficients: pd.DataFrame, runs: pd.DataFrame, size: str) -> pd.DataFrame:
    """The lines of the longest runs of each arm of one size."""
    own = runs[(runs["size"] == size) & runs.arm.isin(coefficients.arm.unique())]
    most = own.groupby("arm").tokens.transform("max")
    return coefficients.merge(own[own.tokens == most][RUN], on=RUN)


def trajectories(coefficients: pd.DataFrame, runs: pd.DataFrame) -> dict[str, Trajectory]:
    """Of every size and arm the first seed's longest run, by ``GFSA (15M, seed 100)``.

    One seed, because heads of two runs that have the same number have nothing else in common.
    """
    found = {}
    for size in by_size(runs) if len(runs) else []:
        lines = longest(coefficients, runs, size)
        for arm in arms_of(lines):
            own = lines[lines.arm == arm]
            seed = int(own.seed.min())
            found[f"{arm} ({size}, seed {seed})"] = trajectory(own[own.seed == seed])
    return found


def trajectory(lines: pd.DataFrame) -> Trajectory:
    """One run's lines as a trajectory."""
    steps = sorted(int(step) for step in lines.step.unique())
    layers = []
    for number in sorted(int(layer) for layer in lines.layer.unique()):
        own = lines[lines.layer.astype(int) == number].astype({"step": int}).sort_values("step")
        if [int(step) for step in own.step] != steps:
            raise ValueError(f"layer {number} has {len(own)} of {len(steps)} steps")
        values = [_heads(row) for row in own.to_dict("records")]
        layers.append(LayerTrajectory(number, f"layer {number}", values))
    return Trajectory(steps, layers)


def _heads(row: dict[Any, Any]) -> list[list[float]]:
    """heads × powers of one line; a filter of lower degree has fewer powers."""
    names = sorted(name for name in row if str(name)[0] == "c" and str(name)[1:].isdigit())
    columns = [[float(v) for v in str(row[name]).split()] for name in names]
    return [list(head) for head in zip(*filter(None, columns), strict=True)]


def draw_coefficients(coefficients: pd.DataFrame, runs: pd.DataFrame, size: str) -> Figure:
    """Powers × layers: every head of the first seed of GFSA, and each arm's mean over heads and
    seeds."""
    from matplotlib.figure import Figure

    lines = longest(coefficients, runs, size)
    arms = arms_of(lines)
    if not arms:
        raise ValueError(f"no run of {size} has coefficients")
    by_arm = {
        arm: [trajectory(own) for _, own in lines[lines.arm == arm].groupby("seed")] for arm in arms
    }
    shown = "GFSA" if "GFSA" in by_arm else arms[-1]
    powers = max(run.powers for own in by_arm.values() for run in own)
    layers = [layer.depth for layer in by_arm[shown][0].layers]
    # with plain, which has no filter, so that no arm gets its colour
    numbers = dict(zip(arms, series_of([PLAIN, *arms])[1:], strict=True))
    figure = Figure(figsize=(1.35 * len(layers) + 0.6, 1.5 * powers + 0.7), layout="constrained")
    panels = figure.subplots(powers, len(layers), squeeze=False, sharex=True, sharey="row")
    for power, row in enumerate(panels):
        for axis, depth in zip(row, layers, strict=True):
            axis.axhline(float(power == 1), color="#444444", linestyle=":", linewidth=1)
            for arm, own in by_arm.items():
                _draw_arm(axis, own, depth, power, COLOURS[numbers[arm]], heads=arm == shown)
            if power == 0:
                axis.set_title(f"layer {depth}", fontsize=8)
            axis.tick_params(labelsize=7)
        row[0].set_ylabel(f"$c_{power}$")
    figure.supxlabel("share of training", fontsize=9)
    handles = [
        _line(COLOURS[numbers[arm]], f"{arm}, mean over heads, {len(own)} seeds")
        for arm, own in by_arm.items()
    ]
    handles.append(_line(COLOURS[numbers[shown]], f"{shown}, each head", linewidth=0.6))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    return figure


def _draw_arm(
    axis: Axes, runs: list[Trajectory], depth: int, power: int, colour: str, heads: bool
) -> None:
    """One coefficient of one layer over training: its mean, and of the first run ``heads``."""
    curves = [_of_layer(run, depth, power) for run in runs]
    known = [curve for curve in curves if curve is not None]
    if not known:
        return
    share = np.array(runs[0].steps) / runs[0].steps[-1]
    if heads:
        axis.plot(share, known[0], color=colour, linewidth=0.6, alpha=0.5)
    mean = np.mean([curve.mean(1) for curve in known], 0)
    axis.plot(share, mean, color=colour, linewidth=1.8)


def _line(colour: str, label: str, **look: Any) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, label=label, **look)


def _of_layer(run: Trajectory, depth: int, power: int) -> Any:
    """steps × heads of one coefficient; None without a filter there, or of lower degree."""
    layer = next((layer for layer in run.layers if layer.depth == depth), None)
    if layer is None or any(len(head) <= power for head in layer.coefficients[0]):
        return None
    return np.array([[head[power] for head in heads] for heads in layer.coefficients])
