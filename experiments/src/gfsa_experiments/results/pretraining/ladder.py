"""The gap between filtered and plain models as the plain model is tuned further."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from gfsa.lens.colours import COLOURS, MARKERS, series_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
_WARMED = "settings.str.contains('warmup=0.15') and not settings.str.contains('epochs|gate')"
_LONG = "settings.str.contains('epochs=3') and not settings.str.contains('gate')"
LADDER = {
    "lr tuned,\nbatch 64": (f"{_FIRST} and not settings.str.contains('temp|gain')", _FIRST),
    "+ temperature\nper head": (
        f"{_FIRST} and not settings.str.contains('gain|init|output_norm|gate|depth')",
        _FIRST,
    ),
    "+ fast rate\nfor gains": (_FIRST, _FIRST),
    "batch 16": (_SMALL_BATCH, _SMALL_BATCH),
    "batch 32,\nwarm-up": (_WARMED, _WARMED),
    "3 epochs,\nbatch 32": (_LONG, _LONG),
}


def draw_ladder(curves: pd.DataFrame, axis: Axes) -> None:
    """The gap of the best runs of seed 0 at each rung, arm by arm."""
    curves = curves.fillna({"options": "", "settings": ""})
    curves = curves[curves["seed"] == 0]
    names = list(ARMS)
    numbers = dict(zip(names, series_of(names), strict=True))
    for name, condition in ARMS.items():
        gaps = {}
        for rung, (plain, filtered) in LADDER.items():
            least = _best(curves, ARMS["plain"], plain)
            line = _best(curves, condition, filtered)
            if least is not None and line is not None and name != "plain":
                gaps[rung] = line["valid loss"].iloc[-1] - least["valid loss"].iloc[-1]
        if gaps:
            look: dict[str, Any] = {
                "color": COLOURS[numbers[name]],
                "marker": MARKERS[numbers[name]],
            }
            axis.plot(list(gaps), list(gaps.values()), label=name, **look)
    axis.axhline(0, color=COLOURS[numbers["plain"]], label="plain")
    axis.set(
        ylabel="validation loss − plain (nats)",
        title="seed 0; plain tuned further →, then trained longer",
    )
    axis.title.set_fontsize(9)
    axis.tick_params(axis="x", labelsize="small")
    axis.legend(frameon=False, fontsize="small")


def _best(curves: pd.DataFrame, arm: str, setting: str) -> pd.DataFrame | None:
    """The curve that ends lowest among the runs of an arm in a setting; None if there is none."""
    found = curves.query(f"({arm}) and ({setting})", engine="python")
    ends = found.loc[found.groupby(LABELS)["step"].idxmax()] if len(found) else found
    if ends.empty:
        return None
    best = ends.nsmallest(1, "valid loss").iloc[0]
    return found[(found[LABELS] == best[LABELS]).all(axis=1)]
