"""The readings in sentences, for readers who are new to these numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from statistics import fmean

from gfsa.lens.readings import AttentionReading, ModelReading

# thresholds at which a sentence changes. They are rules of thumb (docs/lens.md says so): a trained
# model may have a high similarity and work well, so the page compares models instead of judging one
ALIKE = 0.9
RISE = 0.1
FEW = 0.1


def findings(model: ModelReading) -> list[str]:
    """Sentences about the readings of one model, the most important first."""
    sentences = []
    if model.features:
        sentences += [_similarity(model), _rank(model)]
    if model.attention:
        sentences += [*_response(model), _filters(model), *_entropy(model)]
    return [sentence for sentence in sentences if sentence]


def _similarity(model: ModelReading) -> str:
    known = [reading for reading in model.features if math.isfinite(reading.cosine)]
    if len(known) < 2:
        return ""
    first, last = known[0], known[-1]
    text = (
        f"Tokens are {_word(last.cosine - first.cosine)}: mean cosine similarity goes from "
        f"{first.cosine:.2f} ({_place(first.depth)}) to {last.cosine:.2f} (after layer "
        f"{last.depth})."
    )
    alike = [reading.depth for reading in known if reading.depth and reading.cosine > ALIKE]
    if alike:
        text += f" It first passes {ALIKE} after layer {alike[0]}: look there for over-smoothing."
    return text


def _word(rise: float) -> str:
    if rise > RISE:
        return "more alike at the end than at the beginning"
    return (
        "less alike at the end than at the beginning"
        if rise < -RISE
        else "about as alike all along"
    )


def _place(depth: int) -> str:
    return "at the input" if depth == 0 else f"after layer {depth}"


def _rank(model: ModelReading) -> str:
    last = model.features[-1]
    if not math.isfinite(last.effective_rank) or not last.most_rank:
        return ""
    share = last.effective_rank / last.most_rank
    text = (
        f"The last features use {last.effective_rank:.1f} of {last.most_rank:.0f} directions "
        f"(effective rank, {share:.0%})."
    )
    return text + (" Most directions have collapsed." if share < FEW else "")


def high_gain(response: list[float]) -> float:
    """Mean gain over the upper half of the frequencies."""
    return fmean(response[len(response) // 2 :])


def _response(model: ModelReading) -> list[str]:
    maps, filters = [], []
    for layer in model.attention:
        if layer.spectrum is not None:
            maps += [high_gain(row) for row in layer.spectrum.map_response]
            filters += [high_gain(row) for row in layer.spectrum.filter_response]
    if not maps:
        return []
    text = (
        f"Its attention maps pass {fmean(maps):.0%} of what is in the upper half of the "
        "frequencies (mean gain over Fourier modes)"
    )
    changed = any(layer.filter is not None for layer in model.attention)
    return [text + (f"; with its filters {fmean(filters):.0%}." if changed else ".")]


def _filters(model: ModelReading) -> str:
    filtered = [layer for layer in model.attention if layer.filter is not None]
    if not filtered:
        return "No filters are plugged: every head is ordinary attention, low-pass by Theorem 3.1."
    counts = Counter(word for layer in filtered for word in layer.verdict)
    heads = sum(counts.values())
    verdicts = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    moved, where = largest_move(model)
    text = f"Of {heads} filtered heads, by their coefficients: {verdicts} (Theorem 3.1)."
    if moved < 1e-6:
        return text + " No filter has moved from where it started: train, or raise filter_lr."
    return text + f" The largest move from ordinary attention is {moved:.2g}, in layer {where}."


def largest_move(model: ModelReading) -> tuple[float, int]:
    """How far the filters are from ordinary attention at most, and in which layer."""
    filtered = [layer for layer in model.attention if layer.filter is not None]
    return max((_moved(layer), layer.depth) for layer in filtered)


def grouped_reasons(skipped: Mapping[str, str]) -> list[str]:
    """One line for all modules that have the same reason."""
    groups: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        groups.setdefault(reason, []).append(name)
    return [f"{_names(names)}: {reason}" for reason, names in groups.items()]


def _names(names: list[str]) -> str:
    if len(names) <= 2:
        return " and ".join(names)
    return f"{len(names)} modules, {names[0]} to {names[-1]}"


def _moved(layer: AttentionReading) -> float:
    def distance(row: list[float]) -> float:
        return max(abs(c - (1.0 if power == 1 else 0.0)) for power, c in enumerate(row))

    return max(distance(row) for row in layer.coefficients)


def _entropy(model: ModelReading) -> list[str]:
    uniform, single, heads = 0, 0, 0
    for layer in model.attention:
        for share in layer.entropy_share:
            heads += 1
            uniform += share > 0.98
            single += share < 0.02
    found = []
    if uniform:
        found.append(f"{uniform} of {heads} heads attend almost uniformly: they average tokens.")
    if single:
        found.append(f"{single} of {heads} heads attend to a single token almost always.")
    return found
