"""The gap between filtered and plain models as the plain model is tuned further, from rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from gfsa.lens.colours import COLOURS, MARKERS, series_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
_WARMED = "settings.str.contains('warmup={}') and not settings.str.contains('epochs|gate')"
_LONG = "settings.str.contains('epochs=3') and not settings.str.contains('gate')"
LADDER = {
    "lr tuned,\nbatch 64": (f"{_FIRST} and not settings.str.contains('temp|gain')", _FIRST),
    "+ temper-\nature": (
        f"{_FIRST} and not settings.str.contains('gain|init|output_norm|gate|depth')",
        _FIRST,
    ),
    "+ fast\ngains": (_FIRST, _FIRST),
    "batch 16": (_SMALL_BATCH, _SMALL_BATCH),
    "batch 32,\nwarm-up\n241": (_WARMED.format(0.15), _WARMED.format(0.15)),
    "warm-up\n401": (_WARMED.format(0.25), _WARMED.format(0.25)),
    "three\nepochs": (_LONG, _LONG),
}


def draw_ladder(rows: pd.DataFrame, axis: Axes) -> None:
    """The gap of the best runs of seed 0 at each rung, arm by arm.

    Args:
        rows: of the runs of one size, with ``method``, ``options``, ``settings``, ``seed`` and the
            loss ``valid``.
    """
    rows = rows[rows.seed == 0]
    names = list(ARMS)
    numbers = dict(zip(names, series_of(names), strict=True))
    # a rung that an arm lacks keeps its place
    axis.plot(list(LADDER), [0.0] * len(LADDER), color=COLOURS[numbers["plain"]], label="plain")
    for name, condition in ARMS.items():
        gaps = {}
        for rung, (plain, filtered) in LADDER.items():
            least = _best(rows, ARMS["plain"], plain)
            loss = _best(rows, condition, filtered)
            if least is not None and loss is not None and name != "plain":
                gaps[rung] = loss - least
        if gaps:
            look: dict[str, Any] = {
                "color": COLOURS[numbers[name]],
                "marker": MARKERS[numbers[name]],
            }
            axis.plot(list(gaps), list(gaps.values()), label=name, **look)
    axis.set(
        ylabel="validation loss − plain (nats)",
        title="seed 0; plain tuned further →, then trained longer",
    )
    axis.title.set_fontsize(9)
    axis.tick_params(axis="x", labelsize="small")
    axis.legend(frameon=False, fontsize="small")


def _best(rows: pd.DataFrame, arm: str, setting: str) -> float | None:
    """The lowest loss of the runs of an arm in a setting; None if there is none."""
    found = rows.query(f"({arm}) and ({setting})", engine="python").valid.dropna()
    return None if found.empty else float(found.min())
