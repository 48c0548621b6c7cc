"""The forest plot: relative error reductions with their intervals, those of families filled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gfsa_experiments.results.families import Judged
from gfsa_experiments.results.report import named, titles
from gfsa_experiments.results.statistics import Contrast, Interval
from gfsa_experiments.results.tables import ResultTable

_AXIS = "relative error reduction in percent, 95 % interval (right is better)"
# inches
_WIDTH, _ROW = 7.4, 0.27


class Mark(NamedTuple):
    """One interval of the plot."""

    group: str
    """What is compared on what, the title above its marks."""
    label: str
    interval: Interval
    verdict: str
    is_registered: bool


def marks(tables: Sequence[ResultTable], judged: Sequence[Judged] = ()) -> list[Mark]:
    """The comparisons of complete families; without one, every line of the tables with plain."""
    found = []
    for family, outcomes in judged:
        group, labels = family.title.partition(":")[0], family.name
        for outcome in outcomes:
            label = named(outcome.comparison.name, labels)
            found += _mark(group, label, outcome.contrast, outcome.verdict)
    if not found:
        for table, title in zip(tables, titles(tables), strict=True):
            for line in table.lines:
                found += _mark(f"{table.recipe}: {title}", line.name, line.to_reference)
    return found


def _mark(group: str, label: str, found: Contrast | None, verdict: str = "") -> list[Mark]:
    if found is None or found.reduction is None:
        return []
    word = verdict or found.test.reading or ""
    return [Mark(f"{group} ({found.reduced})", label, found.reduction, word, bool(verdict))]


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
    """The figure; right is better. Marks of registered comparisons are filled."""
    from matplotlib.figure import Figure
    from matplotlib.transforms import blended_transform_factory

    if not drawn:
        raise ValueError("no run can be compared with plain, so there is nothing to plot")
    # a row for the title of each group, and one for each of its marks
    rows = list(dict.fromkeys(row for m in drawn for row in ((m.group, ""), (m.group, m.label))))
    figure = Figure(figsize=(_WIDTH, 0.9 + _ROW * len(rows)), layout="constrained")
    axis = figure.subplots()
    axis.axvline(0, color="#000000", linewidth=0.8)
    for mark in drawn:
        height, colour = rows.index((mark.group, mark.label)), "#000000"
        low, high = mark.interval.low, mark.interval.high
        if low is not None and high is not None:
            axis.plot([low, high], [height, height], color=colour, linewidth=1.6)
        fill = colour if mark.is_registered else "white"
        axis.plot(mark.interval.mean, height, "D", color=colour, mfc=fill, markersize=6)
        weight = "bold" if mark.verdict == "better" else "normal"
        look: dict[str, Any] = {
            "va": "center",
            "fontsize": 8,
            "weight": weight,
            "annotation_clip": False,
        }
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
    axis.set_xlabel(_AXIS)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    return figure
