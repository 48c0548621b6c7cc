"""Draws the pictures of docs/concepts.md: ``python docs/site/pictures.py`` (needs gfsa[lens])."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import torch
from matplotlib import pyplot as plt

import gfsa

DOCS = Path(__file__).resolve().parents[1]
PLAIN, GFSA, OTHER = "#666666", "#3f51b5", ("#e6842a", "#2a9d8f", "#b5179e")
# the same file for the same numbers: no date, no random ids
plt.rcParams.update({"svg.hashsalt": "gfsa", "font.size": 10, "axes.spines.right": False})
plt.rcParams.update({"axes.spines.top": False, "legend.frameon": False})


def response(filter: gfsa.GraphFilter, eigenvalues: torch.Tensor) -> torch.Tensor:
    """p(λ) of the first head: what the filter makes of a component with eigenvalue λ."""
    with torch.no_grad():
        powers = eigenvalues[:, None] ** torch.arange(filter.degree + 1)
        return powers @ filter.coefficients()[0]


def draw_responses(path: Path) -> None:
    eigenvalues = torch.linspace(0, 1, 101)
    figure, axes = plt.subplots(figsize=(6.2, 3.4), layout="constrained")
    filters = {
        "ordinary attention, λ": (gfsa.Polynomial(1, degree=1), PLAIN, "--"),
        "GFSA, w0 = 0.2, wK = −0.3, K = 3": (gfsa.GFSA(1, w0=0.2, wK=-0.3), GFSA, "-"),
        "twicing, 2λ − λ²": (gfsa.Twicing(1), OTHER[0], "-"),
        "Laplacian": (gfsa.Laplacian(1), OTHER[1], "-"),
        "PageRank, 4 hops": (gfsa.PageRank(1), OTHER[2], "-"),
    }
    for label, (filter, colour, style) in filters.items():
        axes.plot(eigenvalues, response(filter, eigenvalues), style, color=colour, label=label)
    axes.set_xlabel("eigenvalue λ of the map A")
    axes.set_ylabel("what is left, p(λ)")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


def draw_smoothing(path: Path) -> None:
    """Similarity of tokens after k maps in a row: A each time, or a filter of A each time."""
    torch.manual_seed(0)
    tokens, dim, depth = 32, 16, 12
    q, k, start = (torch.randn(1, 1, tokens, dim) for _ in range(3))
    figure, axes = plt.subplots(figsize=(6.2, 3.2), layout="constrained")
    arms = {
        "A each time": (torch.tensor([0.0, 1.0]), PLAIN, "--"),
        "0.5·I + 0.5·A (degree 1)": (torch.tensor([0.5, 0.5]), OTHER[0], "-"),
        "I + A − A² (degree 2)": (torch.tensor([1.0, 1.0, -1.0]), GFSA, "-"),
    }
    for label, (coefficients, colour, style) in arms.items():
        x, similarity = start, [mean_cosine(start)]
        for _ in range(depth):
            x = gfsa.graph_filter_attention(q, k, x, coefficients)
            similarity.append(mean_cosine(x))
        axes.plot(range(depth + 1), similarity, style, color=colour, marker="o", ms=3, label=label)
    axes.set_xlabel("how often it was applied")
    axes.set_xticks(range(0, depth + 1, 2))
    axes.set_ylabel("mean cosine of two tokens")
    axes.set_ylim(-0.05, 1.05)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


def mean_cosine(x: torch.Tensor) -> float:
    unit = torch.nn.functional.normalize(x[0, 0], dim=-1)
    cosines = unit @ unit.T
    return float((cosines.sum() - len(unit)) / (len(unit) * (len(unit) - 1)))


def save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    # matplotlib ends lines with spaces
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
    plt.close(figure)


if __name__ == "__main__":
    draw_responses(DOCS / "concepts-responses.svg")
    draw_smoothing(DOCS / "concepts-smoothing.svg")
