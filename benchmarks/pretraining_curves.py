"""Curves of pretraining runs: collect them from run folders, and draw validation loss by tokens.

python benchmarks/pretraining_curves.py collect RUNS results/tuning/pretrain-curves.csv
python benchmarks/pretraining_curves.py draw results/tuning/pretrain-curves.csv FIGURE.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd

LABELS = ["method", "options", "settings", "seed"]
# the best line of each arm by validation loss is drawn; controls that act on q and k are plain too
ARMS = {
    "plain": "method == 'plain' and not settings.str.contains('qk_norm')",
    "plain, learned temperature": "settings.str.contains('qk_norm=temperature')",
    "gain only (w1)": "method == 'gfsa' and options.str.contains('learn=w1 ')",
    "degree 1": "method == 'degree1'",
    "GFSA": "method == 'gfsa' and not options.str.contains('learn=')",
}


def collect(runs: Path) -> pd.DataFrame:
    """Every ``curve.csv`` below ``runs`` with the labels of the run's row beside it."""
    parts = []
    for curve in sorted(runs.rglob("curve.csv")):
        row = json.loads((curve.parent / "row.json").read_text())
        parts.append(pd.read_csv(curve).assign(**{name: row[name] for name in LABELS}))
    if not parts:
        raise SystemExit(f"{runs} has no run with a curve.csv; expected the --out of gfsa train")
    return pd.concat(parts)[[*LABELS, *pd.read_csv(curve).columns]]


def draw(curves: pd.DataFrame, figure: Path) -> None:
    """Validation loss by tokens, the best learning rates of each arm."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "gfsa"
    from matplotlib import pyplot as plt

    curves = curves.fillna({"options": "", "settings": ""})
    _, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, condition in ARMS.items():
        arm = curves.query(condition, engine="python")
        best = arm[arm["step"] == arm["step"].max()].nsmallest(1, "valid loss").iloc[0]
        line = arm[(arm[LABELS] == best[LABELS]).all(axis=1)]
        label = f"{name}: {best['valid loss']:.3f}"
        axes.plot(line["tokens"] / 1e6, line["valid loss"], label=label)
    axes.set(xlabel="tokens (millions)", ylabel="validation loss (nats)", ylim=(2.1, 4.5))
    axes.legend(frameon=False)
    plt.savefig(figure, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("collect", "draw"))
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    given = parser.parse_args()
    if given.action == "collect":
        collect(given.source).to_csv(given.destination, index=False, lineterminator="\n")
    else:
        draw(pd.read_csv(given.source), given.destination)


if __name__ == "__main__":
    main()
