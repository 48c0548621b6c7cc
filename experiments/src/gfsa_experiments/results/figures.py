"""The forest plot: relative error reductions with their intervals, those of families filled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gfsa.lens.colours import COLOURS, MARKERS, series_of
from gfsa_experiments.results.families import Judged
from gfsa_experiments.results.report import FILTERS, domains, named
from gfsa_experiments.results.statistics import Interval, pooled_reduction
from gfsa_experiments.results.tables import ResultTable

_CONFIRMATORY = ("#000000", "D")
_AXIS = "relative error reduction in percent, 95 % interval (right is better)"
# inches: of a family's comparison and of a domain, which has two marks
_WIDTH, _ROWS = 7.4, (0.27, 0.42)


class Mark(NamedTuple):
    """One interval of the plot."""

    label: str
    method: str
    """Empty for a comparison of a family."""
    interval: Interval
    tasks: tuple[float, ...] = ()
    """The means of single tasks, drawn as strokes."""
    verdict: str = ""
    """Of a comparison of a family."""
    group: str = ""
    """The title of the family, and what is reduced."""


def marks(tables: Sequence[ResultTable], judged: Sequence[Judged] = ()) -> list[Mark]:
    """Families that are complete first, then the domains."""
    found = []
    for family, outcomes in judged:
        for outcome in outcomes:
            if outcome.contrast is not None and outcome.contrast.reduction is not None:
                # what it compares stands below
                group = f"{family.title.partition(':')[0]} ({outcome.contrast.reduced})"
                label = named(outcome.comparison.name, family.name)
                reduction = outcome.contrast.reduction
                found.append(Mark(label, "", reduction, (), outcome.verdict, group))
    for domain in domains(tables):
        for method, contrasts in domain.to_plain.items():
            interval = pooled_reduction(contrasts)
            if interval is not None:
                tasks = tuple(one.reduction.mean for one in contrasts if one.reduction is not None)
                found.append(Mark(domain.name, FILTERS.get(method, method), interval, tasks))
    return found


def plot(tables: Sequence[ResultTable], path: Path, judged: Sequence[Judged] = ()) -> None:
    """Write the figure, in the format of the path's extension."""
    figure = draw(marks(tables, judged))
    formats, ending = figure.canvas.get_supported_filetypes(), path.suffix.lstrip(".")
    if ending not in formats:
        raise ValueError(
            f"--plot {path}: cannot write {path.suffix or 'a file without extension'}; "
            f"known extensions: {', '.join(sorted(formats))}"
        )
    save(figure, path, dpi=160)


def save(figure: Any, path: Path, dpi: int) -> None:
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    # text stays text, and the same rows give the same file
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gfsa"}):
        figure.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw(drawn: Sequence[Mark]) -> Any:
    """The figure; right is better.

    Families above domains, each part with a scale of its own: what tuned comparisons of many seeds
    show is small beside the intervals of a few seeds.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    if not drawn:
        raise ValueError("no run can be compared with plain, so there is nothing to plot")
    methods = list(dict.fromkeys(mark.method for mark in drawn if mark.method))
    # with plain, which no mark is of, so that no other method gets its colour
    numbers = series_of(["plain", *methods])[1:]
    looks = {"": _CONFIRMATORY}
    looks |= {m: (COLOURS[n], MARKERS[n]) for m, n in zip(methods, numbers, strict=True)}
    families = [mark for mark in drawn if not mark.method]
    parts = [part for part in (families, [mark for mark in drawn if mark.method]) if part]
    heights = [_ROWS[part is not families] * len(_rows(part)) for part in parts]
    size = (_WIDTH, 0.8 + sum(0.4 + own for own in heights))
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.08))
    axes = figure.subplots(len(parts), height_ratios=heights, squeeze=False)[:, 0]
    for axis, part in zip(axes, parts, strict=True):
        _draw_part(figure, axis, part, looks)
    axes[-1].set_xlabel(_AXIS)
    if len(parts) > 1:
        axes[0].set_xlabel(f"{_AXIS}; another scale than below", fontsize=8)
    handles = []
    for method, (colour, shape) in looks.items():
        if any(mark.method == method for mark in drawn):
            label = f"{method}, exploratory" if method else "confirmatory"
            fill = "white" if method else colour
            handles.append(Line2D([], [], label=label, color=colour, marker=shape, mfc=fill))
    if any(len(mark.tasks) > 1 for mark in drawn):
        look: dict[str, Any] = {"color": "#777777", "marker": "|", "linestyle": "none"}
        handles.append(Line2D([], [], label="a single task", **look))
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure


def _draw_part(figure: Any, axis: Any, drawn: Sequence[Mark], looks: dict[str, Any]) -> None:
    """Marks of one scale, those of one label close together, below the title of their group."""
    from matplotlib.transforms import blended_transform_factory

    rows = _rows(drawn)
    axis.axvline(0, color="#000000", linewidth=0.8)
    for mark in drawn:
        row = (mark.group, mark.label)
        beside = [other for other in drawn if (other.group, other.label) == row]
        offset = 0.26 * (beside.index(mark) - (len(beside) - 1) / 2)
        height, (colour, shape) = rows.index(row) + offset, looks[mark.method]
        if len(mark.tasks) > 1:
            axis.scatter(mark.tasks, [height] * len(mark.tasks), 36, colour, marker="|", alpha=0.45)
        low, high = mark.interval.low, mark.interval.high
        if low is not None and high is not None:
            axis.plot([low, high], [height, height], color=colour, linewidth=1.6)
        fill = "white" if mark.method else colour
        axis.plot(mark.interval.mean, height, marker=shape, color=colour, mfc=fill, markersize=6)
        if mark.verdict:
            weight = "bold" if mark.verdict == "better" else "normal"
            look = {"va": "center", "fontsize": 8, "weight": weight, "annotation_clip": False}
            axis.annotate(mark.verdict, (1.01, height), xycoords=axis.get_yaxis_transform(), **look)
    # beside the labels too: a title may be as long as the figure is wide
    across = blended_transform_factory(figure.transFigure, axis.transData)
    for height, (group, label) in enumerate(rows):
        if not label:
            title = axis.text(0.015, height, group, transform=across, va="center", weight="bold")
            title.set(fontsize=9, backgroundcolor="white", in_layout=False)
    labels = {height: label for height, (_, label) in enumerate(rows) if label}
    axis.set_yticks([*labels], [*labels.values()], fontsize=9)
    axis.set_ylim(len(rows) - 0.45, -0.55)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _rows(drawn: Sequence[Mark]) -> list[tuple[str, str]]:
    """Group and label of each row; that of a group's title has no label."""
    found: dict[tuple[str, str], None] = {}
    for mark in drawn:
        if mark.group:
            found.setdefault((mark.group, ""))
        found.setdefault((mark.group, mark.label))
    return list(found)
