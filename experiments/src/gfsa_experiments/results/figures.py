"""The forest plot: relative error reductions with their intervals, confirmed ones filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gfsa.lens.colours import COLOURS, MARKERS, series_of
from gfsa_experiments.results.contrasts import pooled_reduction
from gfsa_experiments.results.overview import FILTERS, Judged, domains
from gfsa_experiments.results.statistics import Interval
from gfsa_experiments.results.tables import ResultTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIRMATORY = ("#000000", "D")
WIDTH, ROW = 7.4, 0.46


@dataclass(frozen=True)
class Mark:
    """One interval of the plot."""

    label: str
    method: str
    """Empty for a comparison of a family."""
    interval: Interval
    tasks: tuple[float, ...] = ()
    """The means of single tasks, drawn as strokes."""


def marks(tables: Sequence[ResultTable], judged: Sequence[Judged] = ()) -> list[Mark]:
    """Families that are complete first, then the domains."""
    found = [
        Mark(f"{family.name}: {outcome.comparison.name}", "", reduction)
        for family, outcomes in judged
        for outcome in outcomes
        if outcome.contrast is not None and (reduction := outcome.contrast.reduction) is not None
    ]
    for domain in domains(tables):
        for method, contrasts in domain.to_plain.items():
            interval = pooled_reduction(contrasts)
            if interval is not None:
                reductions = [contrast.reduction for contrast in contrasts]
                tasks = tuple(found.mean for found in reductions if found is not None)
                found.append(Mark(domain.name, FILTERS.get(method, method), interval, tasks))
    return found


def plot(tables: Sequence[ResultTable], path: Path, judged: Sequence[Judged] = ()) -> None:
    """Write the figure, in the format of the path's extension."""
    import matplotlib

    figure = draw(marks(tables, judged))
    formats = figure.canvas.get_supported_filetypes()
    ending = path.suffix.lstrip(".")
    if ending not in formats:
        raise ValueError(
            f"--plot {path}: cannot write {path.suffix or 'a file without extension'}; "
            f"known extensions: {', '.join(sorted(formats))}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # text stays text, and the same rows give the same file
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gfsa"}):
        figure.savefig(path, dpi=160, metadata={"Date": None} if ending == "svg" else None)


def draw(drawn: Sequence[Mark]) -> Figure:
    """The figure; right is better."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    if not drawn:
        raise ValueError("no run can be compared with plain, so there is nothing to plot")
    labels = list(dict.fromkeys(mark.label for mark in drawn))
    methods = list(dict.fromkeys(mark.method for mark in drawn if mark.method))
    # with plain, which no mark is of, so that no other method gets its colour
    numbers = series_of(["plain", *methods])[1:]
    looks = {"": CONFIRMATORY}
    looks |= {m: (COLOURS[n], MARKERS[n]) for m, n in zip(methods, numbers, strict=True)}
    figure = Figure(figsize=(WIDTH, 1.1 + ROW * len(labels)), layout="constrained")
    axis = figure.add_subplot()
    axis.axvline(0, color="#000000", linewidth=0.8)
    for mark in drawn:
        beside = [other for other in drawn if other.label == mark.label]
        # the marks of one label lie close together
        offset = 0.26 * (beside.index(mark) - (len(beside) - 1) / 2)
        height, (colour, shape) = labels.index(mark.label) + offset, looks[mark.method]
        if len(mark.tasks) > 1:
            axis.scatter(mark.tasks, [height] * len(mark.tasks), 36, colour, marker="|", alpha=0.45)
        low, mean, high = mark.interval.low, mark.interval.mean, mark.interval.high
        if low is not None and high is not None:
            axis.plot([low, high], [height, height], color=colour, linewidth=1.6)
        fill = "white" if mark.method else colour
        axis.plot(mean, height, marker=shape, color=colour, mfc=fill, markersize=6)
    axis.set_yticks(range(len(labels)), labels, fontsize=9)
    axis.set_ylim(len(labels) - 0.45, -0.55)
    axis.set_xlabel("relative error reduction in percent, 95 % interval (right is better)")
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    legend = [
        Line2D(
            [],
            [],
            color=colour,
            marker=shape,
            mfc="white" if method else colour,
            label=f"{method}, exploratory" if method else "confirmatory",
        )
        for method, (colour, shape) in looks.items()
        if any(mark.method == method for mark in drawn)
    ]
    if any(len(mark.tasks) > 1 for mark in drawn):
        stroke = Line2D(
            [], [], color="#777777", marker="|", linestyle="none", label="a single task"
        )
        legend.append(stroke)
    figure.legend(handles=legend, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure
