"""What limits the family's comparisons: are its plain model and its controls at their best?

The rules are those of plans, from before their runs:

- ``pretrain-baseline.txt``: another plain model that ends :data:`MARGIN` or more below the family's
  on valid, and lower with the fresh seeds of ``pretrain-controls.txt`` too, is stronger;
- ``pretrain-controls-rates.txt``: a control that ends :data:`MARGIN` or more lower on valid at
  another learning rate than the family's is not at its best in the family. That plan
  warms up for fewer steps than the family; runs of ``pretrain-warmup.txt`` with as many stand
  beside it and change no verdict;
- ``pretrain-long-warmup.txt``: if plain ends :data:`SCHEDULE` or more lower on valid with a longer
  warm-up at the family's length, the family's plain model is not at its best schedule.
"""

from __future__ import annotations

import math

import pandas as pd

from gfsa_experiments.results.page_blocks import Block, Text
from gfsa_experiments.results.pretraining.arms import PLAIN, settings_apart, words_of
from gfsa_experiments.results.pretraining.controls import rates
from gfsa_experiments.results.pretraining.study import BASELINE, LONG_WARMUP, RATES, Study
from gfsa_experiments.results.pretraining.warmups import warmup_steps
from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig

MARGIN = 0.02
SCHEDULE = 0.017
"""Two standard deviations of a pair in the family, as the plan has it."""
CONTROLS = ("gain only", "gated")
_PLAN = f"[plan](plans/{BASELINE})"
_RATES_PLAN = f"[plan](plans/{RATES})"
# how long a run is, in its settings
_LENGTH = ("epochs=", "max_steps=", "warmup=")


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
    fresh = {t: _with_fresh_seeds(study.controls, t, own.iloc[0]) for t in better.settings}
    lower = [f"`{apart[t]}` by {-d:.4f}" for t, d in fresh.items() if d is not None and d < 0]
    # a run that broke down is not lower
    not_lower = [f"`{apart[t]}`" for t, d in fresh.items() if d is not None and not d < 0]
    unknown = [f"`{apart[t]}`" for t, d in fresh.items() if d is None]
    said = []
    if lower:
        said.append(
            "by its rule **the family's plain model is not the strongest**: with fresh seeds, too, "
            f"plain ends lower with {' and with '.join(lower)} (test loss)"
        )
    if not_lower:
        said.append(f"with {' and with '.join(not_lower)} it is not lower with fresh seeds")
    if unknown:
        said.append(
            f"fresh seeds, which decide whether plain with {' or '.join(unknown)} is stronger, are "
            "not run yet"
        )
    return (
        f"Of {len(others)} other plain models {len(better)} end{'s' * (len(better) == 1)} "
        f"{MARGIN} nats or more below the family's after one epoch (validation loss, seed 0, "
        f"{_PLAN}): {'; '.join(said)}."
    )


def limit_of_schedule(study: Study) -> str:
    """Whether a longer warm-up suits plain better at the family's length; empty before its run."""
    runs = study.long_warmups
    if not study.family or runs.empty:
        return ""
    plain = runs[runs.arm == PLAIN]
    steps = [warmup_steps(*one) for one in zip(plain.settings, plain.steps, strict=True)]
    by_warmup = dict(sorted(zip(steps, plain.valid, strict=True)))
    if len(by_warmup) < 2:
        return ""
    (short, before), *_, (long, after) = by_warmup.items()
    link = f"[plan](plans/{LONG_WARMUP})"
    if math.isnan(after):
        found, ends = f"plain breaks down with {long} steps of warm-up ({link})", "stands"
    else:
        found = (
            f"plain ends at {after:.3f} with {long} steps of warm-up and at {before:.3f} with the "
            f"family's {short} (validation loss, seed 0, exploratory, {link})"
        )
        ends = "stands" if after > before - SCHEDULE else "is **not at its best schedule**"
    rule = f"By the rule, which asks for {SCHEDULE} nats, the family's plain model {ends}."
    return f"Longer warm-up: {found}. {rule}"


def limit_blocks(study: Study) -> list[Block]:
    """Whether the family has its controls at their best learning rates."""
    if not study.family or (study.rates.empty and RATES not in study.unfinished):
        return []
    words = (word.partition("=") for word in _settings_of_plain(study))
    rate = next((float(value) for name, _, value in words if name == "lr"), PretrainConfig.lr)
    found = rates(study.rates) if len(study.rates) else []
    below = [
        f"{own.arm} (lower at {own.best:g}{_by(own.losses[rate] - own.losses[own.best])})"
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
            "suits them more is not known yet"
        )
    else:
        text = (
            f"Gain only and gated heads end nowhere {MARGIN} nats or more lower on valid than at "
            "the family's learning rate, after one epoch"
        )
    return [Text(f"{text} ({_RATES_PLAN}).{_with_longer_warmup(study, rate)}")]


def _with_longer_warmup(study: Study, rate: float) -> str:
    """The losses of the controls by learning rate in the plans of warm-ups, or nothing."""
    losses = {arm: _warmed_up(study.warmups, study.rates, arm) for arm in CONTROLS}
    said = [
        f"{arm} ends at " + ", ".join(f"{loss:.3f} (lr {lr:g})" for lr, loss in own.items())
        for arm, own in losses.items()
        if len(own)
    ]
    if not said:
        return ""
    alone = all(set(own.index) <= {rate} for own in losses.values())
    others = "; other rates were not run with it" if alone else ""
    return f" With a longer warm-up {' and '.join(said)}{others}."


def _warmed_up(runs: pd.DataFrame, rates: pd.DataFrame, arm: str) -> pd.Series:
    """The lowest loss of an arm at each learning rate in the plans of warm-ups.

    Of those runs alone that see as many tokens as the runs of ``rates``.
    """
    if runs.empty or rates.empty:
        return pd.Series(dtype=float)
    as_long = runs.tokens.isin(rates.tokens)
    own = runs[(runs.arm == arm) & as_long & ~_is_of(runs, rates)]
    return own.groupby("lr").valid.min().dropna()


def _is_of(runs: pd.DataFrame, others: pd.DataFrame) -> pd.Series:
    """Which runs are among the others, too."""
    return runs.settings.isin(others.settings)


def _by(nats: float) -> str:
    """By how much; a run that broke down leaves that open."""
    return "" if math.isnan(nats) else f" by {nats:.3f}"


def _settings_of_plain(study: Study) -> frozenset[str]:
    comparison = next(o.comparison for o in study.family if o.comparison.b == PLAIN)
    return _without_length(next(iter(comparison.keys(PLAIN))).settings)


def _without_length(settings: str) -> frozenset[str]:
    return frozenset(word for word in settings.split() if not word.startswith(_LENGTH))


def _with_fresh_seeds(runs: pd.DataFrame, settings: str, family: pd.Series) -> float | None:
    """A plain model's mean test loss less the family's, over the seeds that both have.

    Pairs have one warm-up, whichever it is, and as many tokens as the family's run of the plan.

    Returns:
        None without such a pair; NaN if a run broke down.
    """
    if runs.empty:
        return None
    plain = runs[(runs.method == PLAIN) & (runs.tokens == family.tokens)]
    plain = plain.assign(warmup=[words_of(text).get("warmup", "") for text in plain.settings])
    own, of_family = (
        plain[[_without_length(text) == _without_length(wanted) for text in plain.settings]]
        for wanted in (settings, str(family.settings))
    )
    both = own.merge(of_family, on=["seed", "warmup"])
    return None if both.empty else float((both.test_x - both.test_y).mean(skipna=False))
