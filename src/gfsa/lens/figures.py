"""The report as matplotlib figures: vector output, sized for a paper's column, colour-blind safe.

No global state of matplotlib changes: figures are created without pyplot, styles are local.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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

DrawModel = Callable[[Axes, ModelReading, dict[str, Any]], None]


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
            # the deepest layer that all have
            last = min(_spectra(model)[-1][0].depth for model in models if _spectra(model))
            figures["response"] = _responses(models, [last])
            figures["response_by_layer"] = _responses(models)
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


def _looks(models: list[ModelReading]) -> list[dict[str, Any]]:
    """How the lines of each model look: earlier ones are wider, so that later ones hide none."""
    numbers = series_of([model.name for model in models])
    return [
        {
            "label": model.name,
            "color": COLOURS[number],
            "marker": MARKERS[number],
            "linewidth": 1.6 + 0.9 * (len(models) - 1 - place),
        }
        for place, (model, number) in enumerate(zip(models, numbers, strict=True))
    ]


def _lines(
    models: list[ModelReading], draw_model: DrawModel, xlabel: str, ylabel: str
) -> LensFigure:
    """One panel with what ``draw_model`` draws of each model."""
    figure, axes = _figure()
    axis = axes[0][0]
    for look, model in zip(_looks(models), models, strict=True):
        draw_model(axis, model, look)
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
) -> LensFigure:
    def draw_model(axis: Axes, model: ModelReading, look: dict[str, Any]) -> None:
        xs = [reading.depth for reading in model.features]
        axis.plot(xs, [pick(reading) for reading in model.features], **look)

    figure = _lines(models, draw_model, "layer (0: input)", label)
    figure.axes[0].set_ylim(top=top)
    return figure


def _heads(
    models: list[ModelReading], pick: Callable[[AttentionReading], list[float]], label: str
) -> LensFigure:
    """The mean over heads, and their range."""

    def draw_model(axis: Axes, model: ModelReading, look: dict[str, Any]) -> None:
        rows = [(r.depth, [v for v in pick(r) if math.isfinite(v)]) for r in model.attention]
        rows = [(depth, values) for depth, values in rows if values]
        xs = [depth for depth, _ in rows]
        lows, highs = ([end(values) for _, values in rows] for end in (min, max))
        axis.plot(xs, [fmean(values) for _, values in rows], **look)
        axis.fill_between(xs, lows, highs, color=look["color"], alpha=0.12, linewidth=0)

    figure = _lines(models, draw_model, "layer", label)
    figure.axes[0].set_ylim(top=max(1.05, figure.axes[0].get_ylim()[1]))
    return figure


def _singular_values(axis: Axes, model: ModelReading, look: dict[str, Any]) -> None:
    if model.features:
        values = model.features[-1].singular_values
        xs = [i / max(1, len(values) - 1) for i in range(len(values))]
        axis.plot(xs, values, **look | {"marker": ""})


def _spectra(model: ModelReading) -> list[tuple[AttentionReading, Spectrum]]:
    return [(layer, layer.spectrum) for layer in model.attention if layer.spectrum is not None]


def _draw_response(axis: Axes, layer: AttentionReading, s: Spectrum, look: dict[str, Any]) -> None:
    of_filter, of_map = (
        [fmean(column) for column in zip(*heads, strict=True)]
        for heads in (s.filter_response, s.map_response)
    )
    axis.plot(s.frequencies, of_filter, **look | {"marker": ""})
    if layer.filter is not None:
        axis.plot(s.frequencies, of_map, color=look["color"], linestyle="--", linewidth=1)


def _responses(models: list[ModelReading], depths: Sequence[int] = ()) -> Figure:
    """One panel a layer, all of them by default, as in the paper's Fig. 1a and its appendix."""
    depths = depths or sorted({layer.depth for model in models for layer, _ in _spectra(model)})
    columns = min(4, len(depths))
    rows = math.ceil(len(depths) / columns)
    size = COLUMN if len(depths) == 1 else (1.75 * columns, 1.45 * rows)
    figure, axes = _figure(rows, columns, size)
    panels = [axis for row in axes for axis in row]
    for axis, depth in zip(panels, depths, strict=False):
        for look, model in zip(_looks(models), models, strict=True):
            for layer, found in _spectra(model):
                if layer.depth == depth:
                    _draw_response(axis, layer, found, look)
        axis.set_title(f"layer {depth}")
    for axis in panels[len(depths) :]:
        axis.remove()
    _share_range(panels[: len(depths)], 0.0)
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
        cells = [[math.nan] * heads for _ in layers]
        for row, layer in zip(cells, layers, strict=True):
            for head, coefficients in enumerate(layer.coefficients):
                row[head] = dict(enumerate(coefficients)).get(power, math.nan) - usual
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
    powers, rows = trajectory.powers, len(trajectory.layers)
    figure, axes = _figure(rows, powers, (2.1 * powers, 0.5 + 1.0 * rows))
    for layer, panels in zip(trajectory.layers, axes, strict=True):
        for power, axis in enumerate(panels):
            axis.axhline(1.0 if power == 1 else 0.0, color="#444444", linestyle=":", linewidth=1)
            for head, row in enumerate(layer.coefficients[0]):
                if power < len(row):
                    values = [step[head][power] for step in layer.coefficients]
                    axis.plot(trajectory.steps, values, linewidth=1)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
        panels[0].set_ylabel(f"layer {layer.depth}")
    for power, axis in enumerate(axes[0]):
        axis.set_title(f"$c_{power}$")
        _share_range([row[power] for row in axes])
    figure.supxlabel("step", fontsize=9)
    return figure


def _share_range(axes: list[Axes], low: float = math.inf) -> None:
    """The same range of y for all, so that layers can be compared."""
    lows, highs = zip(*(axis.get_ylim() for axis in axes), strict=True)
    for axis in axes:
        axis.set_ylim(min(low, *lows), max(highs))
