"""A figure of the paired differences to plain with their intervals, one panel per table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from gfsa_experiments.results.number_format import scale_of
from gfsa_experiments.results.summary import titles
from gfsa_experiments.results.tables import Line, ResultTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours; the markers differ too, for readers who cannot tell the colours apart
LOOKS = {
    "better": ("#0072B2", "^"),
    "worse": ("#D55E00", "v"),
    "no difference shown": ("#555555", "o"),
    None: ("#555555", "x"),
}
LEGEND = (
    "bar: 95 % interval, strokes: seeds, ▲ better, ▼ worse, ● no difference shown, × no interval"
)
WIDTH = 5.6
TITLE_WIDTH = 60
PANELS_A_ROW = 2


def plot(tables: Sequence[ResultTable], path: Path) -> None:
    """Write the figure, in the format of the path's extension."""
    import matplotlib

    figure = draw(tables)
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


def draw(tables: Sequence[ResultTable]) -> Figure:
    """The figure; in every panel, right is better."""
    from matplotlib.figure import Figure

    compared = [table for table in tables if any(line.difference for line in table.lines)]
    if not compared:
        raise ValueError("no run can be compared with plain, so there is nothing to plot")
    columns = min(PANELS_A_ROW, len(compared))
    in_rows = [compared[i : i + columns] for i in range(0, len(compared), columns)]
    heights = [1.2 + 0.28 * max(len(_compared(table)) for table in row) for row in in_rows]
    figure = Figure(figsize=(WIDTH * columns, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(in_rows), columns, height_ratios=heights)
    for number, (table, title) in enumerate(zip(compared, titles(compared), strict=True)):
        _panel(figure.add_subplot(grid[divmod(number, columns)]), table, title)
    figure.supxlabel(LEGEND, fontsize=8)
    return figure


def _panel(axis: Any, table: ResultTable, title: str) -> None:
    lines, scale = _compared(table), scale_of(table)
    axis.axvline(0, color="#000000", linewidth=0.8)
    for height, line in enumerate(lines):
        difference = line.difference
        assert difference is not None
        colour, marker = LOOKS[difference.verdict]
        axis.plot(
            [scale.factor * value for value in difference.values],
            [height] * len(difference.values),
            linestyle="none",
            marker="|",
            markersize=7,
            color=colour,
            alpha=0.45,
        )
        if difference.low is not None and difference.high is not None:
            ends = [scale.factor * difference.low, scale.factor * difference.high]
            axis.plot(ends, [height, height], color=colour, linewidth=2)
        axis.plot(scale.factor * difference.mean, height, marker=marker, color=colour, markersize=6)
    axis.set_yticks(range(len(lines)), [line.name for line in lines], fontsize=8)
    axis.set_ylim(len(lines) - 0.5, -0.5)
    if not table.higher_is_better:
        axis.invert_xaxis()
    unit = " in percent" if scale.factor == 100 else ""
    axis.set_xlabel(f"difference to plain, {table.metric}{unit} (right is better)", fontsize=8)
    axis.set_title(fill(f"{table.recipe}: {title}", TITLE_WIDTH), fontsize=9, loc="left")
    axis.tick_params(labelsize=8)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _compared(table: ResultTable) -> list[Line]:
    return [line for line in table.lines if line.difference is not None]
