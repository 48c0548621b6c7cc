"""The runs by which arms were tuned, as a table: each arm's result on valid by learning rate."""

from __future__ import annotations

import math

import pandas as pd

from gfsa_experiments.results.number_format import NONE, Scale, decimals_for, span
from gfsa_experiments.results.page_blocks import Block, Grid, Heading, Text

PLAIN = "plain"
DEFAULT = "default"
"""Stands for the recipe's own learning rate, which settings do not name."""


def tuning_blocks(rows: pd.DataFrame) -> list[Block]:
    """A table for each task of one recipe.

    Args:
        rows: those of ``results/tuning``, one of each run.
    """
    blocks: list[Block] = []
    for (task, _), own in rows.groupby(["task", "data"], sort=True):
        text, grid = _table(own)
        blocks += [Heading(f"Tuning: {task}", 3), Text(text), grid]
    return blocks


def _table(rows: pd.DataFrame) -> tuple[str, Grid]:
    metric, higher = str(rows.metric.iloc[0]), bool(rows.higher_is_better.iloc[0])
    words = [dict(word.partition("=")[::2] for word in text.split()) for text in rows.settings]
    shared = set.intersection(*(set(own.items()) for own in words))
    table = rows.assign(
        lr=[own.get("lr", DEFAULT) for own in words],
        arm=[
            " ".join([method, *(word for word in options.split() if "filter_lr" not in word)])
            for method, options in zip(rows.method, rows.options, strict=True)
        ],
        line=[
            " ".join(
                [method, *options.split()]
                + [f"{k}={v}" for k, v in own.items() if k != "lr" and (k, v) not in shared]
            )
            for method, options, own in zip(rows.method, rows.options, words, strict=True)
        ],
    )
    cells = table.groupby(["arm", "line", "lr"], sort=False).valid.mean()
    # of no finite run the best is NaN, which no run equals
    best = {
        str(arm): float(found.max() if higher else found.min())
        for arm, found in cells.groupby("arm")
    }
    rates = sorted(table.lr.unique(), key=lambda lr: -1.0 if lr == DEFAULT else float(lr))
    scale = Scale(1, decimals_for(None, float(cells.mean())))
    grid = []
    order = list(table[["arm", "line"]].drop_duplicates().itertuples(index=False, name=None))
    arms = list(dict.fromkeys(arm for arm, _ in order))
    # lines of an arm together, plain first
    for arm, line in sorted(order, key=lambda pair: (pair[0] != PLAIN, arms.index(pair[0]))):
        found = [float(cells.get((arm, line, rate), math.nan)) for rate in rates]
        own, plain = best[arm], best.get(PLAIN)
        shown = [_cell(value, scale, value == own) for value in found]
        lead = math.nan if arm == PLAIN or plain is None or own not in found else own - plain
        grid.append([line, *shown, NONE if math.isnan(lead) else scale.signed(lead)])
    seeds = table.groupby(["line", "lr"]).seed.nunique()
    one = f"seed {rows.seed.iloc[0]}" if rows.seed.nunique() == 1 else f"{span(seeds)} seeds"
    better = "higher" if higher else "lower"
    text = (
        f"{metric} on valid by learning rate, {better} is better, {one}; the best of each arm "
        f"in bold, and how far it is from plain's. Exploratory, the best of several: "
        f"[{len(rows)} rows](tuning/{rows.recipe.iloc[0]}.csv)."
    )
    columns = ["lr", *rates, "best − plain's"]
    return text, Grid(columns, grid, ("lr",))


def _cell(value: float, scale: Scale, is_best: bool) -> str:
    if math.isnan(value):
        return NONE
    return f"**{scale.number(value)}**" if is_best else scale.number(value)
