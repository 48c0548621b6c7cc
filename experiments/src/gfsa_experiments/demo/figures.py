"""The demo's figures: similarity by depth, accuracy seed by seed, and the filters' response."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gfsa_experiments.demo.summary import DemoRun, Summary

# Okabe and Ito's colours suit colour-blind readers; markers distinguish the lines in print
COLOURS = ("#000000", "#E69F00", "#0072B2")
MARKERS = ("o", "s", "^")
STYLE = {
    "figure.figsize": (4.6, 3.4),
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
    "svg.fonttype": "none",
    # without a fixed salt an SVG file differs from run to run
    "svg.hashsalt": "gfsa",
}


def draw(
    runs: Sequence[DemoRun], summaries: Sequence[Summary], held_out: str, out: Path
) -> list[Path]:
    """Write every figure as PNG and SVG into ``out``; returns the paths."""
    import matplotlib

    # figures go to files only: no display is needed
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    written = []
    with plt.rc_context(STYLE):
        for name, figure in (
            ("similarity", similarity(plt, summaries)),
            ("accuracy", accuracy(plt, runs, summaries, held_out)),
            ("response", response(plt, runs)),
        ):
            for suffix in ("png", "svg"):
                path = out / f"{name}.{suffix}"
                figure.savefig(path, metadata={"Date": None} if suffix == "svg" else None)
                written.append(path)
            plt.close(figure)
    return written


def similarity(plt: Any, summaries: Sequence[Summary]) -> Any:
    """Cosine similarity of an image's tokens, from the embedding to the last layer."""
    figure, axes = plt.subplots()
    for summary, colour, marker in zip(summaries, COLOURS, MARKERS, strict=True):
        mean, std = np.array(summary.similarity), np.array(summary.similarity_std)
        depth = np.arange(len(mean))
        axes.plot(depth, mean, color=colour, marker=marker, markersize=4, label=summary.variant)
        axes.fill_between(depth, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("layers passed")
    axes.set_ylabel("cosine similarity of tokens")
    axes.set_title("How alike tokens become with depth (mean ± std over seeds)", fontsize=9)
    axes.legend()
    return figure


def accuracy(plt: Any, runs: Sequence[DemoRun], summaries: Sequence[Summary], held_out: str) -> Any:
    """Accuracy of every run; runs of one seed are connected, since they are compared in pairs."""
    figure, axes = plt.subplots()
    names = [summary.variant for summary in summaries]
    seeds = sorted({run.seed for run in runs})
    # a small offset per seed: runs of equal accuracy would hide each other
    places = np.arange(len(names)) + np.linspace(-0.1, 0.1, len(seeds))[:, None]
    for seed, places_of_seed in zip(seeds, places, strict=True):
        of_seed = {run.variant: run.accuracy for run in runs if run.seed == seed}
        values = [of_seed[name] for name in names]
        axes.plot(places_of_seed, values, color="#999999", linewidth=0.8, zorder=1)
        for place, value, colour, marker in zip(
            places_of_seed, values, COLOURS, MARKERS, strict=True
        ):
            axes.scatter(place, value, color=colour, marker=marker, s=22, zorder=2)
    for position, (summary, colour) in enumerate(zip(summaries, COLOURS, strict=True)):
        axes.hlines(summary.accuracy, position - 0.22, position + 0.22, color=colour, linewidth=2.5)
    axes.set_xticks(range(len(names)), names)
    axes.margins(x=0.2)
    axes.set_ylabel(f"{held_out} accuracy (%)")
    axes.set_title("Every run: a grey line connects one seed, a bar is the mean", fontsize=9)
    axes.grid(axis="x", visible=False)
    return figure


def response(plt: Any, runs: Sequence[DemoRun]) -> Any:
    """The learned polynomials p(λ): what a layer does to a component that A multiplies by λ."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    filtered = [run for run in runs if run.coefficients]
    names = list(dict.fromkeys(run.variant for run in filtered))
    figure, panels = plt.subplots(
        1, len(names), figsize=(3.4 * len(names) + 0.8, 3.4), sharey=True, squeeze=False
    )
    eigenvalue = np.linspace(0, 1, 101)
    layers = len(filtered[0].coefficients)
    # viridis without its palest end, which is invisible on white
    colours = LinearSegmentedColormap.from_list("depth", colormaps["viridis"](np.linspace(0, 0.88)))
    scale: Any = ScalarMappable(Normalize(1, layers), colours)
    for axes, name in zip(panels[0], names, strict=True):
        # over seeds and heads: (layer, power)
        learned = np.mean(
            [run.coefficients for run in filtered if run.variant == name], axis=(0, 2)
        )
        for layer, coefficients in enumerate(learned, start=1):
            values = np.polynomial.polynomial.polyval(eigenvalue, coefficients)
            axes.plot(eigenvalue, values, color=scale.to_rgba(layer), linewidth=1.2)
        axes.plot([0, 1], [0, 1], color="black", linestyle=":", label="plain attention")
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("eigenvalue λ of A  (1: tokens all alike)")
    panels[0][0].set_ylabel("filter's response p(λ), mean over heads")
    panels[0][0].legend()
    ticks = sorted({1, (1 + layers) // 2, layers})
    figure.colorbar(scale, ax=list(panels[0]), label="layer", ticks=ticks)
    return figure
