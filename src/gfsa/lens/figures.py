"""The report as matplotlib figures: vector output, sized for a paper's column, colour-blind safe.

No global state of matplotlib changes: figures are created without pyplot, styles are local.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gfsa.lens.colours import COLOURS, MARKERS, series_of
from gfsa.lens.readings import AttentionReading, ModelReading, Numbers, Spectrum

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

Curve = Callable[[ModelReading], list[tuple[float, Numbers]]]
"""The points of a model's line, and the values at each."""


class LensFigure(Figure):
    """A figure that is saved in the style in which it was drawn."""

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        with matplotlib.rc_context(STYLE):
            super().savefig(*args, **kwargs)


def draw(models: list[ModelReading]) -> dict[str, Figure]:
    """Every figure that the readings allow, by name."""
    figures: dict[str, Figure] = {}
    with matplotlib.rc_context(STYLE):
        if any(model.features for model in models):
            depth, share = "layer (0: input)", "index, as a share of all"
            figures |= {
                "similarity": _lines(models, _tokens("cosine"), depth, "cosine similarity", 1),
                "rank": _lines(models, _tokens("effective_rank"), depth, "effective rank"),
                "residual": _lines(models, _tokens("residual"), depth, "rank-one residual", 1),
                "singular_values": _lines(models, _last_values, share, "σ / σ₁, last features", 1),
            }
        if any(_spectra(model) for model in models):
            # the deepest layer that all have
            last = min(_spectra(model)[-1][0].depth for model in models if _spectra(model))
            figures["response"] = _response(models, last)
        for model in models:
            if any(layer.filter is not None for layer in model.attention):
                figures[f"coefficients ({model.name})"] = _coefficients(model)
        share, energy = "entropy, share of maximum", "Dirichlet energy after"
        figures["entropy"] = _lines(models, _heads("entropy_share"), "layer", share, 1.05)
        figures["energy"] = _lines(models, _heads("energy_after"), "layer", energy, 1.05)
    return figures


def _figure(columns: int = 1, size: tuple[float, float] = COLUMN) -> tuple[Figure, list[Axes]]:
    figure = LensFigure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _looks(models: list[ModelReading]) -> Iterator[tuple[dict[str, Any], ModelReading]]:
    """How the lines of each model look: earlier ones are wider, so that later ones hide none."""
    numbers = series_of([model.name for model in models])
    for place, (model, number) in enumerate(zip(models, numbers, strict=True)):
        width = 1.6 + 0.9 * (len(models) - 1 - place)
        look = {"label": model.name, "color": COLOURS[number], "linewidth": width}
        yield look | {"marker": MARKERS[number]}, model


def _tokens(what: str) -> Curve:
    return lambda model: [(reading.depth, [getattr(reading, what)]) for reading in model.features]


def _heads(what: str) -> Curve:
    return lambda model: [(reading.depth, getattr(reading, what)) for reading in model.attention]


def _last_values(model: ModelReading) -> list[tuple[float, Numbers]]:
    values = model.features[-1].singular_values if model.features else []
    return [(at / max(1, len(values) - 1), [value]) for at, value in enumerate(values)]


def _lines(
    models: list[ModelReading], curve: Curve, xlabel: str, ylabel: str, top: float | None = None
) -> Figure:
    """One line a model; where a point has several values, their mean and their range.

    ``top``: where the axis ends, unless a value is larger.
    """
    figure, (axis,) = _figure()
    by_layer = xlabel.startswith("layer")
    for look, model in _looks(models):
        points = [(x, [v for v in values if math.isfinite(v)]) for x, values in curve(model)]
        points = [(x, values) for x, values in points if values]
        xs, means = [x for x, _ in points], [fmean(values) for _, values in points]
        # a curve of many points has no room for marks
        axis.plot(xs, means, **look if by_layer else look | {"marker": ""})
        lows, highs = ([end(values) for _, values in points] for end in (min, max))
        if lows != highs:
            axis.fill_between(xs, lows, highs, color=look["color"], alpha=0.12, linewidth=0)
    _label(axis, models, xlabel, ylabel)
    if top is not None and axis.dataLim.ymax <= top:
        axis.set_ylim(top=top)
    if by_layer:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    return figure


def _label(axis: Axes, models: list[ModelReading], xlabel: str, ylabel: str) -> None:
    axis.set(xlabel=xlabel, ylabel=ylabel)
    if axis.dataLim.ymin >= 0:
        axis.set_ylim(bottom=0)
    if len(models) > 1:
        axis.legend()


def _spectra(model: ModelReading) -> list[tuple[AttentionReading, Spectrum]]:
    return [(layer, layer.spectrum) for layer in model.attention if layer.spectrum is not None]


def _response(models: list[ModelReading], depth: int) -> Figure:
    """The gain of one layer on Fourier modes, as in the paper's Fig. 1a; dashed: its map alone."""
    figure, (axis,) = _figure()
    for look, model in _looks(models):
        for layer, spectrum in _spectra(model):
            if layer.depth != depth:
                continue
            bare = look | {"marker": ""}
            axis.plot(spectrum.frequencies, _mean(spectrum.filter_response), **bare)
            if layer.filter is not None:
                style = {"color": look["color"], "linestyle": "--", "linewidth": 1}
                axis.plot(spectrum.frequencies, _mean(spectrum.map_response), **style)
    _label(axis, models, "frequency, cycles per token", f"gain, layer {depth}")
    return figure


def _mean(heads: list[Numbers]) -> Numbers:
    return [fmean(column) for column in zip(*heads, strict=True)]


def _coefficients(model: ModelReading) -> Figure:
    """Layers × heads, one panel per power; white is ordinary attention."""
    layers = model.attention
    powers = max(len(row) for layer in layers for row in layer.coefficients)
    heads = max(len(layer.coefficients) for layer in layers)
    size = (max(2.2, 0.9 + 0.22 * heads) * powers, max(1.8, 0.9 + 0.2 * len(layers)))
    figure, axes = _figure(powers, size)
    for power, axis in enumerate(axes):
        usual = 1.0 if power == 1 else 0.0
        cells = [[math.nan] * heads for _ in layers]
        for row, layer in zip(cells, layers, strict=True):
            for head, coefficients in enumerate(layer.coefficients):
                if power < len(coefficients):
                    row[head] = coefficients[power] - usual
        reach = max((abs(v) for row in cells for v in row if math.isfinite(v)), default=0) or 1e-3
        drawn = axis.pcolormesh(cells, cmap="PuOr_r", vmin=-reach, vmax=reach)
        axis.set_title(f"$c_{power}$" + (" − 1" if usual else ""))
        axis.set_xticks([0.5, heads - 0.5], ["1", str(heads)])
        axis.set_yticks([0.5, len(layers) - 0.5], [str(layers[0].depth), str(layers[-1].depth)])
        axis.invert_yaxis()
        axis.grid(False)
        axis.set_xlabel("head")
        # matplotlib would rasterise a colour bar with so many levels
        solids: Any = figure.colorbar(drawn, ax=axis, shrink=0.85).solids
        solids.set_rasterized(False)
    axes[0].set_ylabel("layer")
    return figure
