"""Probes of many trained models as one table: plain, and the paired difference of every other arm.

See :func:`gfsa_experiments.tasks.pretrain.probes.probe` for what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd

from gfsa_experiments.results.pretraining.arms import PLAIN, arms_of
from gfsa_experiments.results.pretraining.between import are_near
from gfsa_experiments.results.pretraining.collect import RUN
from gfsa_experiments.results.statistics import PairedDifference, paired_difference

# positions 2^k … 2^(k+1) − 1 of a row are group k; the last group may be cut off, and is left out
_POSITIONS = {"loss, tokens 1–15": range(4), "loss, tokens 16–127": range(4, 7)}
_LATER = "loss, tokens from 128 on"
SINK = 0.3
"""A head that gives the first token more attention than this on average is a sink."""


@dataclass(frozen=True)
class Measure:
    """One number of every run: the mean of plain, and each arm's difference to it."""

    name: str
    plain: float
    """The mean over plain's seeds."""
    differences: dict[str, PairedDifference]


def measures(probes: pd.DataFrame) -> list[Measure]:
    """Every measure of runs of one size and length; arms without a seed in common are left out.

    Args:
        probes: lines of ``probes.csv`` with their ``arm``.
    """
    values: dict[str, dict[str, dict[int, float]]] = {}
    for _, run in probes.groupby(RUN):
        arm, seed = str(run.arm.iloc[0]), int(run.seed.iloc[0])
        for name, value in _of_run(run).items():
            by_seed = values.setdefault(name, {}).setdefault(arm, {})
            if seed in by_seed:
                raise ValueError(
                    f"two runs of {arm} with seed {seed} have probes; take runs of one length"
                )
            by_seed[seed] = value
    found = []
    others = [arm for arm in arms_of(probes) if arm != PLAIN] if len(probes) else []
    for name, by_arm in values.items():
        plain = by_arm.get(PLAIN, {})
        # which sign is better is not said: most of these are neither
        pairs = {arm: paired_difference(plain, by_arm.get(arm, {}), False) for arm in others}
        known = {arm: pair for arm, pair in pairs.items() if pair is not None}
        if plain:
            found.append(Measure(name, sum(plain.values()) / len(plain), known))
    return found


def at_loss(plain: Iterable[tuple[float, float, float]], loss: float) -> float | None:
    """What plain's measure is where plain has ``loss``, on a line between two lengths of it.

    None beyond plain's lengths, and between two that are far apart (:mod:`.between`).

    Args:
        plain: for each length its tokens, and the loss and the measure of plain's runs.
    """
    ends = sorted(plain, key=lambda end: end[1])
    for (tokens, low, at_low), (others, high, at_high) in pairwise(ends):
        if low <= loss <= high:
            if not are_near(tokens, others):
                return None
            share = (loss - low) / (high - low) if high > low else 0.0
            return at_low + share * (at_high - at_low)
    return None


def _of_run(lines: pd.DataFrame) -> dict[str, float]:
    """The measures of one run, in the order of the table."""
    values = {
        str(name): [[float(v) for v in text.split()] for text in own["values"].astype(str)]
        for name, own in lines.groupby("probe")
    }
    found: dict[str, float] = {}
    for probe, label in (("induction", "repeated random tokens"), ("recall", "recalled pairs")):
        if f"{probe} second" in values:
            found[f"loss, {label}, first time"] = values[f"{probe} first"][0][0]
            found[f"loss, {label}, second time"] = values[f"{probe} second"][0][0]
    for probe, measure in _MEASURES.items():
        if probe in values:
            found |= measure(values[probe])
    return found


def _by_position(values: list[list[float]]) -> dict[str, float]:
    """The loss in groups of positions, each group with the weight of its positions."""
    groups = values[0][:-1]
    found = {}
    for label, span in (_POSITIONS | {_LATER: range(7, len(groups))}).items():
        if span and max(span) < len(groups):
            # group k has 2^k positions
            sizes = [2.0**k for k in span]
            total = sum(size * groups[k] for size, k in zip(sizes, span, strict=True))
            found[label] = total / sum(sizes)
    return found


def _by_frequency(values: list[list[float]]) -> dict[str, float]:
    """The loss by how frequent the token to predict is."""
    rarest, *middle, most_frequent = values[0]
    return {
        "loss, rarest tenth of tokens": rarest,
        "loss, middle tenths": sum(middle) / len(middle),
        "loss, most frequent tenth": most_frequent,
    }


def _entropy(values: list[list[float]]) -> dict[str, float]:
    """The mean over the heads of all layers."""
    heads = [head for layer in values for head in layer]
    return {"entropy of attention, share of its maximum": sum(heads) / len(heads)}


def _sinks(values: list[list[float]]) -> dict[str, float]:
    """The attention that the heads of all layers give the first token."""
    heads = [head for layer in values for head in layer]
    many = f"heads with more than {SINK:g} of it there"
    return {
        "attention on the first token": sum(heads) / len(heads),
        many: sum(head > SINK for head in heads) / len(heads),
    }


# probe → the measures of its values, a row for each layer or one in all
_MEASURES: dict[str, Callable[[list[list[float]]], dict[str, float]]] = {
    "position": _by_position,
    "frequency": _by_frequency,
    "entropy": _entropy,
    "sink": _sinks,
}
