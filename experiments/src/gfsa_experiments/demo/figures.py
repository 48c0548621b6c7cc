"""The demo's figure: the validation curve of each variant, and the paired differences to plain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from gfsa.lens.colours import COLOURS, MARKERS, series_of
from gfsa_experiments.demo.summary import DemoRun, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(runs: Sequence[DemoRun], path: Path) -> None:
    """Write the figure, in the format of the path's extension."""
    import matplotlib
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(run.row.method for run in runs))
    numbers = dict(zip(names, series_of(names), strict=True))
    figure = Figure(figsize=(7.6, 3.1), layout="constrained")
    curves, differences = figure.subplots(1, 2)
    _curves(curves, runs, numbers)
    _differences(differences, runs, numbers)
    for axis in (curves, differences):
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    # text stays text, and the same runs give the same file
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gfsa"}):
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)


def _curves(axis: Axes, runs: Sequence[DemoRun], numbers: dict[str, int]) -> None:
    """The mean over seeds of the validation metric by step, and a thin line for each seed."""
    metric = runs[0].row.metric.replace("_", " ")
    for name, number in numbers.items():
        curves = [run.curve for run in runs if run.row.method == name]
        for curve in curves:
            axis.plot(*zip(*curve, strict=True), color=COLOURS[number], linewidth=0.5, alpha=0.45)
        mean = [(points[0][0], fmean(y for _, y in points)) for points in zip(*curves, strict=True)]
        axis.plot(
            *zip(*mean, strict=True),
            color=COLOURS[number],
            marker=MARKERS[number],
            markersize=3.5,
            label=name,
        )
    axis.set(xlabel="step", ylabel=f"{metric} on the validation part")
    axis.legend(frameon=False, fontsize=8)


def _differences(axis: Axes, runs: Sequence[DemoRun], numbers: dict[str, int]) -> None:
    """Every seed's difference to plain, their mean and its 95 % interval."""
    lines = [line for line in table_of(runs).lines if line.difference is not None]
    for at, line in enumerate(lines):
        found, colour = line.difference, COLOURS[numbers[line.method]]
        assert found is not None
        axis.scatter(found.values, [at - 0.16] * len(found.values), 18, colour, alpha=0.6)
        if found.low is not None and found.high is not None:
            axis.plot([found.low, found.high], [at, at], color=colour, linewidth=2)
        axis.plot(found.mean, at, color=colour, marker=MARKERS[numbers[line.method]])
    axis.axvline(0, color=COLOURS[numbers["plain"]], linewidth=1.6)
    axis.set_yticks(range(len(lines)), [line.method for line in lines])
    axis.set_ylim(len(lines) - 0.5, -0.5)
    row = runs[0].row
    better = "right" if row.higher_is_better else "left"
    axis.set_xlabel(f"{row.metric.replace('_', ' ')} − plain ({better} is better)")
