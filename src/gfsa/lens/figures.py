"""The report as matplotlib figures: vector output, sized for a paper's column, colour-blind safe.

No global state of matplotlib changes: figures are created without pyplot, styles are local.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gfsa.lens.colours import COLOURS, MARKERS, series_of
from gfsa.lens.readings import AttentionReading, FeatureReading, ModelReading, Spectrum
from gfsa.lens.trajectory import Trajectory

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
    # text stays text: searchable, and editable in a vector program
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}
COLUMN = (3.4, 2.4)


class LensFigure(Figure):
    """A figure that is saved in the style in which it was drawn."""

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        with matplotlib.rc_context(STYLE):
            super().savefig(*args, **kwargs)


def draw(
    models: list[ModelReading], trajectories: Mapping[str, Trajectory] | None = None
) -> dict[str, Figure]:
    """Every figure that the readings and the coefficients over training allow, by name."""
    figures: dict[str, Figure] = {}
    with matplotlib.rc_context(STYLE):
        if any(model.features for model in models):
            figures["similarity"] = _by_depth(models, lambda r: r.cosine, "cosine similarity", 1)
            figures["rank"] = _by_depth(models, lambda r: r.effective_rank, "effective rank", None)
            figures["residual"] = _by_depth(models, lambda r: r.residual, "rank-one residual", 1)
            figures["singular_values"] = _lines(
                models, _singular_values, "index, as a share of all", "σ / σ₁, last features"
            )
            figures["singular_values"].axes[0].set_ylim(0, 1)
        if any(_spectra(model) for model in models):
            figures["response"] = _lines(
                models,
                _last_response,
                "frequency (cycles per token), last layer",
                "gain on Fourier modes",
            )
            figures["response_by_layer"] = _response_by_layer(models)
        for model in models:
            if any(layer.filter is not None for layer in model.attention):
                figures[f"coefficients ({model.name})"] = _coefficients(model)
        if models:
            figures["entropy"] = _heads(
                models, lambda r: r.entropy_share, "entropy, share of maximum"
            )
            figures["energy"] = _heads(models, lambda r: r.energy_after, "Dirichlet energy after")
        for name, trajectory in (trajectories or {}).items():
            if trajectory.layers:
                figures[f"coefficients over training ({name})"] = _over_training(trajectory)
    return figures


def _figure(rows: int = 1, columns: int = 1, size: tuple[float, float] = COLUMN) -> tuple[Any, Any]:
    figure = LensFigure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _lines(
    models: list[ModelReading],
    draw_model: Callable[[Axes, ModelReading, int], None],
    xlabel: str,
    ylabel: str,
) -> Figure:
    """One panel with what ``draw_model`` draws of each model in its colour."""
    figure, axes = _figure()
    axis = axes[0][0]
    for number, model in zip(_series(models), models, strict=True):
        draw_model(axis, model, number)
    _widen_lines_below(axis)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    if xlabel.startswith("layer"):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if len(models) > 1:
        axis.legend()
    return figure


def _by_depth(
    models: list[ModelReading],
    pick: Callable[[FeatureReading], float],
    label: str,
    top: float | None,
) -> Figure:
    def draw_model(axis: Axes, model: ModelReading, number: int) -> None:
        xs = [reading.depth for reading in model.features]
        ys = [pick(reading) for reading in model.features]
        axis.plot(xs, ys, label=model.name, color=COLOURS[number], marker=MARKERS[number])

    figure = _lines(models, draw_model, "layer (0: input)", label)
    figure.axes[0].set_ylim(top=top)
    return figure


def _heads(
    models: list[ModelReading], pick: Callable[[AttentionReading], list[float]], label: str
) -> Figure:
    def draw_model(axis: Axes, model: ModelReading, number: int) -> None:
        rows = [(r.depth, [v for v in pick(r) if math.isfinite(v)]) for r in model.attention]
        xs = [depth for depth, values in rows if values]
        heads = [values for _, values in rows if values]
        means, colour = [fmean(values) for values in heads], COLOURS[number]
        axis.plot(xs, means, label=model.name, color=colour, marker=MARKERS[number])
        lows, highs = [min(values) for values in heads], [max(values) for values in heads]
        axis.fill_between(xs, lows, highs, color=colour, alpha=0.12, linewidth=0)

    figure = _lines(models, draw_model, "layer", label)
    figure.axes[0].set_ylim(top=max(1.05, figure.axes[0].get_ylim()[1]))
    return figure


def _singular_values(axis: Axes, model: ModelReading, number: int) -> None:
    if model.features:
        values = model.features[-1].singular_values
        xs = [i / max(1, len(values) - 1) for i in range(len(values))]
        axis.plot(xs, values, label=model.name, color=COLOURS[number])


def _last_response(axis: Axes, model: ModelReading, number: int) -> None:
    """The last layer, as in the paper's Fig. 1a."""
    for layer, spectrum in _spectra(model)[-1:]:
        _draw_response(axis, number, model.name, layer, spectrum)


def _mean_over(rows: list[list[float]]) -> list[float]:
    return [fmean(column) for column in zip(*rows, strict=True)]


def _spectra(model: ModelReading) -> list[tuple[AttentionReading, Spectrum]]:
    return [(layer, layer.spectrum) for layer in model.attention if layer.spectrum is not None]


def _draw_response(
    axis: Axes, number: int, name: str, layer: AttentionReading, s: Spectrum
) -> None:
    colour = COLOURS[number]
    axis.plot(s.frequencies, _mean_over(s.filter_response), color=colour, label=name)
    if layer.filter is not None:
        mean = _mean_over(s.map_response)
        axis.plot(s.frequencies, mean, color=colour, linestyle="--", linewidth=1)


def _response_by_layer(models: list[ModelReading]) -> Figure:
    """Every layer, as in the figure of the paper's appendix."""
    depths = sorted({layer.depth for model in models for layer, _ in _spectra(model)})
    columns = min(4, len(depths))
    rows = math.ceil(len(depths) / columns)
    figure, axes = _figure(rows, columns, (1.75 * columns, 1.45 * rows))
    panels = [axis for row in axes for axis in row]
    for axis, depth in zip(panels, depths, strict=False):
        for number, model in zip(_series(models), models, strict=True):
            for layer, found in _spectra(model):
                if layer.depth == depth:
                    _draw_response(axis, number, model.name, layer, found)
        _widen_lines_below(axis)
        axis.set_title(f"layer {depth}")
    top = max(axis.get_ylim()[1] for axis in panels[: len(depths)])
    for axis in panels[: len(depths)]:
        axis.set_ylim(0, top)
    for axis in panels[len(depths) :]:
        axis.set_visible(False)
    figure.supxlabel("frequency (cycles per token)", fontsize=9)
    figure.supylabel("gain on Fourier modes", fontsize=9)
    if len(models) > 1:
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(models))
    return figure


def _coefficients(model: ModelReading) -> Figure:
    """Layers × heads, one panel per power; white is ordinary attention."""
    layers = model.attention
    powers = max(len(row) for layer in layers for row in layer.coefficients)
    heads = max(len(layer.coefficients) for layer in layers)
    size = (max(2.2, 0.9 + 0.22 * heads) * powers, max(1.8, 0.9 + 0.2 * len(layers)))
    figure, axes = _figure(1, powers, size)
    for power, axis in enumerate(axes[0]):
        usual = 1.0 if power == 1 else 0.0
        cells = [
            [
                layer.coefficients[head][power] - usual
                if head < len(layer.coefficients) and power < len(layer.coefficients[head])
                else math.nan
                for head in range(heads)
            ]
            for layer in layers
        ]
        reach = max((abs(v) for row in cells for v in row if math.isfinite(v)), default=0) or 1e-3
        drawn = axis.pcolormesh(cells, cmap="PuOr_r", vmin=-reach, vmax=reach)
        axis.set_title(f"$c_{power}$" + (" − 1" if usual else ""))
        axis.set_xticks([0.5, heads - 0.5], ["1", str(heads)])
        axis.set_yticks([0.5, len(layers) - 0.5], [str(layers[0].depth), str(layers[-1].depth)])
        axis.invert_yaxis()
        axis.grid(False)
        axis.set_xlabel("head")
        # matplotlib would rasterise a colour bar with so many levels
        figure.colorbar(drawn, ax=axis, shrink=0.85).solids.set_rasterized(False)
    axes[0][0].set_ylabel("layer")
    return figure


def _over_training(trajectory: Trajectory) -> Figure:
    """Layers × powers, one line per head; dotted is ordinary attention."""
    powers = trajectory.powers
    rows = len(trajectory.layers)
    figure, axes = _figure(rows, powers, (2.1 * powers, 0.5 + 1.0 * rows))
    for layer, panels in zip(trajectory.layers, axes, strict=True):
        for power, axis in enumerate(panels):
            axis.axhline(1.0 if power == 1 else 0.0, color="#444444", linestyle=":", linewidth=1)
            for head in range(len(layer.coefficients[0])):
                values = [step[head][power : power + 1] for step in layer.coefficients]
                if all(values):
                    axis.plot(trajectory.steps, [v[0] for v in values], linewidth=1)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
        panels[0].set_ylabel(f"layer {layer.depth}")
    for power, axis in enumerate(axes[0]):
        axis.set_title(f"$c_{power}$")
        _share_range([row[power] for row in axes])
    figure.supxlabel("step", fontsize=9)
    return figure


def _share_range(axes: list[Axes]) -> None:
    """The same range of y for all, so that layers can be compared."""
    lows, highs = zip(*(axis.get_ylim() for axis in axes), strict=True)
    for axis in axes:
        axis.set_ylim(min(lows), max(highs))


def _series(models: list[ModelReading]) -> list[int]:
    return series_of([model.name for model in models])


def _widen_lines_below(axis: Axes) -> None:
    """Draw a line that others lie on wide and faint, so that both are seen.

    Lines are on each other if nine of ten common points differ by less than 1 % of the axis.
    """
    low, high = axis.get_ylim()
    points = [_points(line) for line in axis.lines]
    for number, line in enumerate(axis.lines):
        above = 0
        for other in points[number + 1 :]:
            gaps = [abs(points[number][x] - other[x]) for x in points[number].keys() & other.keys()]
            close = sum(gap < 0.01 * (high - low) for gap in gaps)
            above += len(gaps) > 1 and close >= 0.9 * len(gaps)
        if above:
            line.set_linewidth(line.get_linewidth() + 2.6 * above)
            line.set_markersize(line.get_markersize() + 2.6 * above)
            line.set_alpha(0.45)


def _points(line: Line2D) -> dict[float, float]:
    data: Any = line.get_data()
    return {float(x): float(y) for x, y in zip(*data, strict=True) if math.isfinite(float(y))}
