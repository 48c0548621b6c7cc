"""What limits the family's comparisons: are its plain model and its controls at their best?

Both rules are those of plans, from before their runs:

- ``pretrain-baseline.txt``: another plain model that ends :data:`MARGIN` or more below the family's
  on valid, and lower with the fresh seeds of ``pretrain-controls.txt`` too, is stronger;
- ``pretrain-controls-rates.txt``: a control that ends :data:`MARGIN` or more lower on valid at
  another learning rate than the family's is not at its best in the family.
"""

from __future__ import annotations

import math

import pandas as pd

from gfsa_experiments.results.page_blocks import Block, Text
from gfsa_experiments.results.pretraining.arms import PLAIN, settings_apart
from gfsa_experiments.results.pretraining.controls import rates
from gfsa_experiments.results.pretraining.study import BASELINE, RATES, Study
from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig

MARGIN = 0.02
CONTROLS = ("gain only", "gated")
_PLAN = f"[plan](plans/{BASELINE})"
_RATES_PLAN = f"[plan](plans/{RATES})"
# how long a run is, in its settings
_LENGTH = ("epochs=", "max_steps=")

_WITH_FRESH_SEEDS = {
    True: "and lower with fresh seeds, too: **the family's plain model is not the strongest**",
    None: "and fresh seeds, which decide whether it is stronger, are not run yet",
    False: "but not with fresh seeds",
}


def limit_of_plain(study: Study) -> str:
    """Whether the family's plain model is the strongest, in a sentence; empty without a plan."""
    if not study.family or (study.baseline.empty and BASELINE not in study.unfinished):
        return ""
    plain = study.baseline[study.baseline.method == PLAIN]
    of_family = _settings_of_plain(study)
    is_own = [_without_length(text) == of_family for text in plain.settings]
    own, others = plain[is_own], plain[[not found for found in is_own]]
    if BASELINE in study.unfinished or own.valid.isna().all():
        return (
            "Whether another plain model is stronger than the family's, once its gains learn fast, "
            f"is not known yet ({_PLAN})."
        )
    better = others[others.valid <= own.valid.iloc[0] - MARGIN]
    if better.empty:
        return (
            f"Of {len(others)} other plain models none ends {MARGIN} nats or more below the "
            f"family's after one epoch (validation loss, seed 0, {_PLAN})."
        )
    apart = settings_apart(plain.settings)
    with_fresh_seeds = {
        text: _ends_lower(study.controls, text, str(own.settings.iloc[0]))
        for text in better.settings
    }
    parts = []
    for ends_lower, words in _WITH_FRESH_SEEDS.items():
        names = [f"`{apart[t]}`" for t, found in with_fresh_seeds.items() if found is ends_lower]
        if names:
            parts.append(
                f"Plain with {' or '.join(names)} ends {MARGIN} nats or more below the family's "
                f"plain model after one epoch (validation loss, seed 0, {_PLAN}), {words}."
            )
    return " ".join(parts)


def limit_blocks(study: Study) -> list[Block]:
    """Whether the family has its controls at their best learning rates."""
    if not study.family or (study.rates.empty and RATES not in study.unfinished):
        return []
    words = (word.partition("=") for word in _settings_of_plain(study))
    rate = next((float(value) for name, _, value in words if name == "lr"), PretrainConfig.lr)
    found = rates(study.rates) if len(study.rates) else []
    below = [
        f"{own.arm} (better at {own.best:g}{_by(own.losses[rate] - own.losses[own.best])})"
        for own in found
        # a run that broke down has no loss: the family's rate is not the best one either
        if own.arm in CONTROLS
        and own.best is not None
        and rate in own.losses
        and not own.losses[rate] - own.losses[own.best] < MARGIN
    ]
    if below:
        text = (
            f"The family has below their best, by {MARGIN} nats or more on valid after one epoch: "
            f"{' and '.join(below)}"
        )
        if RATES in study.unfinished:
            text += "; rates further out are not run yet"
    elif RATES in study.unfinished:
        text = (
            "Gain only and gated heads have plain's learning rate in the family; whether another "
            "is better for them is not known yet"
        )
    else:
        text = (
            f"Gain only and gated heads end nowhere {MARGIN} nats or more lower on valid than at "
            "the family's learning rate, after one epoch"
        )
    return [Text(f"{text} ({_RATES_PLAN}).")]


def _by(nats: float) -> str:
    """By how much; a run that broke down leaves that open."""
    return "" if math.isnan(nats) else f" by {nats:.3f}"


def _settings_of_plain(study: Study) -> frozenset[str]:
    comparison = next(o.comparison for o in study.family if o.comparison.b == PLAIN)
    return _without_length(next(iter(comparison.keys(PLAIN))).settings)


def _without_length(settings: str) -> frozenset[str]:
    return frozenset(word for word in settings.split() if not word.startswith(_LENGTH))


def _ends_lower(runs: pd.DataFrame, settings: str, of_plain: str) -> bool | None:
    """Whether a plain model's mean test loss is lower over the seeds that both have."""
    plain = runs[runs.method == PLAIN]
    both = plain[plain.settings == settings].merge(plain[plain.settings == of_plain], on="seed")
    if both.empty:
        return None
    return bool((both.test_x - both.test_y).mean() < 0)
