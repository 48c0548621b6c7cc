"""Plots time and memory against length, from rows of the suite ``lengths``.

``python -m gfsa_benchmarks.figure results/bench.csv docs/kernels-lengths.svg``
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from gfsa_benchmarks.case import Shape

Curve = list[tuple[int, float, float]]
# colours for colour-blind readers, markers that stay visible where curves meet
LOOKS = (("#000000", "o"), ("#E69F00", "s"), ("#0072B2", "^"))
PANELS = ((1, "forward + backward, ms"), (2, "peak memory, MiB"))


def curves(path: Path) -> dict[str, Curve]:
    """``{variant: [(tokens, ms, MiB), …]}``; the last of several runs of one length counts.

    Only lengths differ along a curve: rows of other heads or causality than the first are left out.
    """
    found: dict[str, dict[int, tuple[int, float, float]]] = defaultdict(dict)
    first: Shape | None = None
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row.get("suite", "lengths") != "lengths":
                continue
            shape = Shape.parse(row["shape"])
            first = first or shape
            tokens = shape.tokens
            if shape != replace(first, tokens=tokens):
                continue
            point = (tokens, float(row["fwd_bwd_ms"]), float(row["peak_mib"]))
            found[row["variant"]][tokens] = point
    if not found:
        raise ValueError(f"{path} has no rows of the suite lengths; run `gfsa bench` with it first")
    return {variant: [points[n] for n in sorted(points)] for variant, points in found.items()}


def draw(path: Path, out: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    # text stays text, and the same rows give the same file
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gfsa"})
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
    for (variant, points), (colour, marker) in zip(curves(path).items(), LOOKS, strict=False):
        for axis, (column, label) in zip(axes, PANELS, strict=True):
            axis.plot(
                [point[0] for point in points],
                [point[column] for point in points],
                color=colour,
                marker=marker,
                markersize=5,
                fillstyle="none",
                label=variant,
            )
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xlabel("tokens")
            axis.set_ylabel(label)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
