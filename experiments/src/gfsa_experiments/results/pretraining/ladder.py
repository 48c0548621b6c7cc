"""The gap between filtered and plain models as the plain model is tuned further."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

LABELS = ["method", "options", "settings", "seed"]
ARMS = {
    "plain": "method == 'plain'",
    "gain only (w1)": "method == 'gfsa' and options.str.contains('learn=w1')",
    "degree 1": "method == 'degree1'",
    "GFSA": "method == 'gfsa' and not options.str.contains('learn=')",
}
# The plain model is tuned further from rung to rung. Each rung has a condition for plain runs and
# one for filtered runs; the best run of either by validation loss are compared.
_FIRST = "not settings.str.contains('batch_size|epochs')"
_SMALL_BATCH = "settings.str.contains('batch_size=16')"
LADDER = {
    "lr tuned,\nbatch 64": (f"{_FIRST} and not settings.str.contains('temp|gain')", _FIRST),
    "+ temperature\nper head": (
        f"{_FIRST} and not settings.str.contains('gain|init|output_norm|gate|depth')",
        _FIRST,
    ),
    "+ fast rate\nfor gains": (_FIRST, _FIRST),
    "batch 16": (_SMALL_BATCH, _SMALL_BATCH),
    "3 epochs": ("settings.str.contains('epochs=3')", "settings.str.contains('epochs=3')"),
}


def draw(source: Path, figure: Path) -> None:
    """Left: validation loss by tokens, every arm tuned. Right: the gap to plain as it was tuned."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "gfsa"
    from matplotlib import pyplot as plt

    curves = pd.read_csv(source).fillna({"options": "", "settings": ""})
    curves = curves[curves["seed"] == 0]
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for rung, style in (("batch 16", "--"), ("3 epochs", "-")):
        for number, (name, condition) in enumerate(ARMS.items()):
            line = _best(curves, condition, LADDER[rung][1])
            if line is not None:
                epochs = "1 epoch" if rung == "batch 16" else rung
                label = f"{name}, {epochs}: {line['valid loss'].iloc[-1]:.3f}"
                left.plot(
                    line["tokens"] / 1e6, line["valid loss"], style, color=f"C{number}", label=label
                )
    left.set(xlabel="tokens (millions)", ylabel="validation loss (nats)", ylim=(1.6, 3.2))
    left.legend(frameon=False, fontsize="small")
    for number, (name, condition) in enumerate(ARMS.items()):
        gaps = {}
        for rung, (plain, filtered) in LADDER.items():
            least = _best(curves, ARMS["plain"], plain)
            line = _best(curves, condition, filtered)
            if least is not None and line is not None and name != "plain":
                gaps[rung] = line["valid loss"].iloc[-1] - least["valid loss"].iloc[-1]
        if gaps:
            right.plot(list(gaps), list(gaps.values()), "o-", color=f"C{number}", label=name)
    right.axhline(0, color="C0", label="plain")
    right.set(ylabel="validation loss − plain (nats)", title="plain tuned further to the right →")
    right.tick_params(axis="x", labelsize="small")
    right.legend(frameon=False)
    plt.savefig(figure, metadata={"Date": None})


def _best(curves: pd.DataFrame, arm: str, setting: str) -> pd.DataFrame | None:
    """The curve that ends lowest among the runs of an arm in a setting; None if there is none."""
    found = curves.query(f"({arm}) and ({setting})", engine="python")
    ends = found.loc[found.groupby(LABELS)["step"].idxmax()] if len(found) else found
    if ends.empty:
        return None
    best = ends.nsmallest(1, "valid loss").iloc[0]
    return found[(found[LABELS] == best[LABELS]).all(axis=1)]
