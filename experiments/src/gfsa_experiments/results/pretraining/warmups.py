"""Runs with longer warm-ups: which schedule is best for each arm, and what is left of gaps.

The plan ``pretrain-warmup.txt`` has them beside the runs of the scaling plan,
``pretrain-epoch-tuning.txt`` longer ones of one epoch, and ``pretrain-epoch-rates.txt`` and
``pretrain-epoch-high-rates.txt`` these at other rates.
"""

from __future__ import annotations

import pandas as pd

from gfsa_experiments.results.number_format import NONE, Scale
from gfsa_experiments.results.page_blocks import Block, Grid, Heading, Text
from gfsa_experiments.results.pretraining.arms import PLAIN, arms_of, words_of
from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig

NATS = Scale(1, 3)


def warmup_steps(settings: str, steps: int) -> int:
    """The steps in which a run's learning rate rises."""
    share = float(words_of(settings).get("warmup", PretrainConfig.warmup))
    return round(share * steps)


def warmup_blocks(runs: pd.DataFrame) -> list[Block]:
    """The loss of every arm by length, warm-up and rate, and each arm's best against plain's.

    Nothing before a run with another warm-up than the recipe's is there.
    """
    if runs.empty or not runs.settings.str.contains("warmup=").any():
        return []
    pairs = zip(runs.settings, runs.steps, strict=True)
    table = runs.assign(warm=[warmup_steps(text, int(steps)) for text, steps in pairs])
    arms = arms_of(table)
    rows = []
    # not by tokens per parameter, of which gated heads see a little less
    for _, own in table.groupby("tokens"):
        ratio = f"{own.ratio.max():.1f}"
        for (lr, warm), cell in own.groupby(["lr", "warm"]):
            losses = cell.groupby("arm").valid.min().dropna()
            cells = [NATS.number(losses[arm]) if arm in losses else NONE for arm in arms]
            rows.append([ratio, f"{lr:g}", str(warm), *cells])
        best = own.groupby("arm").valid.min().dropna()
        gaps = [
            NATS.signed(best[arm] - best[PLAIN])
            if arm != PLAIN and {arm, PLAIN} <= set(best.index)
            else NONE
            for arm in arms
        ]
        rows.append([ratio, "best", "− plain's best", *gaps])
    text = (
        "Validation loss in nats of runs with a schedule of their own, seed 0. One seed, and the "
        "best of several: exploratory ([plan](plans/pretrain-warmup.txt), "
        "[longer ones](plans/pretrain-epoch-tuning.txt), "
        "[other rates](plans/pretrain-epoch-rates.txt), "
        "[higher ones](plans/pretrain-epoch-high-rates.txt)). An arm's best is that of the runs "
        "here, and some arms have fewer of them than plain."
    )
    columns = ["tokens per parameter", "lr", "steps of warm-up", *arms]
    return [Heading("Warm-up"), Text(text), Grid(columns, rows)]
