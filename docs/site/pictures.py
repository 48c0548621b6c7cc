"""Draws the pictures of the pages: ``python docs/site/pictures.py`` (needs matplotlib, pandas).

docs/idea-light.svg is drawn by hand; its dark form has other colours. Those of docs/concepts.md are
made from the coefficients that runs have learned, as their rows in results/ have them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import pandas as pd
import torch
from matplotlib import pyplot as plt

import gfsa

DOCS = Path(__file__).resolve().parents[1]
RESULTS = DOCS.parent / "results"
PLAIN = "#666666"
DARK = {"#1f2328": "#e6edf3", "#59636e": "#9da7b3", "#3f51b5": "#a5b0ff", "#c2334d": "#ff8fa3"}
# what is shown: recipe, method, label, colour
RUNS = (
    ("causal_lm", "gfsa", "GFSA, WikiText-2", "#3f51b5"),
    ("causal_lm", "degree1", "degree 1, WikiText-2", "#2a9d8f"),
    ("pretrain", "degree1", "degree 1, pretraining", "#b5179e"),
    ("image", "gfsa", "GFSA, CIFAR-10", "#e6842a"),
)
# the same file for the same numbers: no date, no random ids
plt.rcParams.update({"svg.hashsalt": "gfsa", "svg.fonttype": "none", "font.size": 10})
plt.rcParams.update({"axes.spines.right": False, "axes.spines.top": False, "legend.frameon": False})


def learned(recipe: str, method: str) -> pd.DataFrame:
    """The mean coefficients of runs that learned all numbers, without the exclusive term."""
    rows = pd.read_csv(RESULTS / f"{recipe}.csv", dtype={"options": str, "coefficients": str})
    rows = rows[(rows.method == method) & ~rows.options.fillna("").str.contains("learn=|share=")]
    return rows.coefficients.str.split(expand=True).astype(float)


def draw_responses(path: Path) -> None:
    """p(λ) relative to p(1): what a filter leaves of a component with eigenvalue λ."""
    eigenvalues = torch.linspace(0, 1, 101)
    figure, axes = plt.subplots(figsize=(5.4, 4.0), layout="constrained")
    axes.plot(eigenvalues, eigenvalues, "--", color=PLAIN, label="ordinary attention")
    for recipe, method, label, colour in RUNS:
        c = torch.tensor(learned(recipe, method).mean().to_numpy(), dtype=torch.float32)
        response = (eigenvalues[:, None] ** torch.arange(len(c))) @ c
        axes.plot(eigenvalues, response / c.sum(), color=colour, label=label)
    axes.axhline(0, color="#000000", linewidth=0.6)
    axes.set_xlabel("eigenvalue λ of the map: detail … what tokens share")
    axes.set_ylabel("p(λ) / p(1)")
    axes.legend(loc="lower right")
    save(figure, path)


def draw_own_value(path: Path) -> None:
    """c0 of every run from scratch, one stroke each."""
    figure, axes = plt.subplots(figsize=(5.4, 2.4), layout="constrained")
    for row, (recipe, method, label, colour) in enumerate(RUNS):
        c0 = learned(recipe, method)[0]
        axes.scatter(c0, [row] * len(c0), 120, colour, marker="|")
        axes.annotate(f"{len(c0)} runs", (0.02, row), va="center", fontsize=9, color=PLAIN)
        axes.text(-1.3, row, label, va="center", ha="left", fontsize=9)
    axes.axvline(0, color="#000000", linewidth=0.8)
    axes.set(
        xlim=(-1.32, 0.17),
        ylim=(len(RUNS) - 0.4, -0.6),
        yticks=[],
        xticks=[-0.8, -0.6, -0.4, -0.2, 0],
    )
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("learned c0, mean over heads and layers")
    save(figure, path)


def draw_smoothing(path: Path) -> None:
    """Similarity of tokens after k maps in a row: A each time, or a learned filter of A."""
    torch.manual_seed(0)
    tokens, dim, depth = 32, 16, 12
    q, k, start = (torch.randn(1, 1, tokens, dim) for _ in range(3))
    figure, axes = plt.subplots(figsize=(5.4, 3.2), layout="constrained")
    arms = {"A each time": (torch.tensor([0.0, 1.0]), PLAIN, "--")}
    for recipe, method, label, colour in RUNS[:2]:
        mean = torch.tensor(learned(recipe, method).mean().to_numpy(), dtype=torch.float32)
        arms[label] = (mean, colour, "-")
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
    axes.legend(loc="center right")
    save(figure, path)


def draw_losses(path: Path) -> None:
    """The curves that the snippets of docs/start.md give, as a reader runs them."""
    page = (DOCS / "start.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", page.partition("## Keep it")[0], re.M | re.S):
        exec(code, names)
    figure, axes = plt.subplots(figsize=(5.4, 3.0), layout="constrained")
    for (name, curve), colour in zip(names["curves"].items(), (PLAIN, RUNS[0][3]), strict=True):
        axes.plot(curve, "--" if name == "plain" else "-", color=colour, label=name)
    axes.set(xlabel="step", ylabel="training loss, nats per byte")
    axes.legend()
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


def darken(light: Path, dark: Path) -> None:
    drawing = light.read_text(encoding="utf-8")
    for colour, other in DARK.items():
        drawing = drawing.replace(colour, other)
    dark.write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    darken(DOCS / "idea-light.svg", DOCS / "idea-dark.svg")
    draw_responses(DOCS / "concepts-responses.svg")
    draw_own_value(DOCS / "concepts-own-value.svg")
    draw_smoothing(DOCS / "concepts-smoothing.svg")
    draw_losses(DOCS / "start-losses.svg")
