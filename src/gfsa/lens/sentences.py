"""Readings as text: a table of the numbers, sentences about them, and what to do next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from gfsa.lens.readings import AttentionReading, FeatureReading, ModelReading, Numbers

# five plain models that we trained (two ViTs on CIFAR-10, a language model on WikiText-2, encoders
# on STS-B and BigCloneBench): their least and largest similarity by depth, as a share of all layers
USUAL_SIMILARITY = (
    (0.0, 0.06, 0.27),
    (0.25, 0.16, 0.39),
    (0.5, 0.18, 0.55),
    (0.75, 0.19, 0.74),
    (1.0, 0.23, 0.97),
)
# and what they pass of high frequencies
USUAL_PASSED = (0.19, 0.45)

# similarities above which tokens are called alike, and that differ
ALIKE = 0.9
RISE = 0.1
DIFFERENCE = 0.05
# the share of directions below which most have collapsed
FEW = 0.1
# shares of the largest entropy above which a head averages, and below which it looks at one token
UNIFORM = 0.98
SINGLE = 0.02
# distances of coefficients from ordinary attention
HARDLY = 0.01
FAR = 5.0


def caption(model: ModelReading) -> str:
    """What the columns of :func:`rows` are."""
    most = f", of {model.features[-1].most_rank:.0f} at most" if model.features else ""
    return (
        f"{model.samples} samples, {model.tokens} tokens, {model.seconds:.1f} s; heads are "
        f"averaged. rank: effective{most}. energy: of v → after the layer. high: gain on the upper "
        "half of the frequencies relative to frequency 0, map → filter. filter: heads by Theorem "
        "3.1"
    )


def rows(model: ModelReading) -> list[list[str]]:
    """The numbers as text: a row of headings, then one for each layer, averaged over heads."""
    headings = ["layer", "cosine", "rank", "residual", "norm"]
    headings += ["entropy", "energy", "high", "filter"]
    if any(reading.own is not None for reading in model.attention):
        headings += ["p", "A_ii", "cos(y, v)"]
    features = {reading.depth: reading for reading in model.features}
    attention = {reading.depth: reading for reading in model.attention}
    found = [headings]
    for depth in sorted(features.keys() | attention.keys()):
        cells = ["input" if depth == 0 else str(depth)]
        tokens = features.get(depth)
        if tokens is not None:
            numbers = (tokens.cosine, tokens.effective_rank, tokens.residual, tokens.norm)
            cells += map(_number, numbers, (3, 1, 3, 2))
        if depth in attention:
            cells += [""] * (5 - len(cells)) + _attention_cells(attention[depth])
        found.append(cells + [""] * (len(headings) - len(cells)))
    return found


def _attention_cells(reading: AttentionReading) -> list[str]:
    energy = f"{_mean(reading.energy_before, 2)}→{_mean(reading.energy_after, 2)}"
    responses, verdicts = [], "none"
    if reading.spectrum is not None:
        responses = [reading.spectrum.map_response, reading.spectrum.filter_response]
    if reading.filter is None:
        responses = responses[:1]
    else:
        short = {"low-pass": "low", "high-pass": "high", "all-pass": "all", "mixed": "mix"}
        counts = Counter(reading.verdict).most_common()
        verdicts = " ".join(f"{count} {short[word]}" for word, count in counts)
    high = "→".join(percent(passed(response)) for response in responses)
    own = reading.own
    of_own = [] if own is None else [_mean(x, 3) for x in (own.part, own.weight, own.cosine)]
    return [_mean(reading.entropy_share, 2), energy, high, verdicts, *of_own]


def _mean(heads: Numbers, digits: int) -> str:
    return _number(fmean(heads), digits)


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


def passed(responses: Iterable[Numbers]) -> float:
    """What heads pass of the upper half of the frequencies, relative to frequency 0.

    A filter that only amplifies passes what its map does. It is a ratio of means over heads: a
    head that removes frequency 0 has no ratio of its own.
    """
    rows = list(responses)
    high = fmean(fmean(row[len(row) // 2 :]) for row in rows)
    low = fmean(row[0] for row in rows)
    return high / low if low else math.inf


def percent(share: float) -> str:
    """A share that may be larger than everything, where little of frequency 0 is left."""
    if math.isnan(share):
        return "–"
    return f"{share:.0%}" if share < 9.995 else ">999%"


def findings(model: ModelReading) -> list[str]:
    """Sentences about the readings of one model, the most important first."""
    found = [_similarity(model)]
    if model.features:
        last = model.features[-1]
        if last.effective_rank < FEW * last.most_rank:
            found.append(
                f"The last features use {last.effective_rank:.1f} of {last.most_rank:.0f} "
                "directions (effective rank): most have collapsed."
            )
    if model.attention:
        found += [_response(model), _filters(model)]
    shares = [share for layer in model.attention for share in layer.entropy_share]
    kinds = {
        "attend almost uniformly: they average tokens": sum(s > UNIFORM for s in shares),
        "attend to a single token almost always": sum(s < SINGLE for s in shares),
    }
    found += [f"{count} of {len(shares)} heads {what}." for what, count in kinds.items() if count]
    return [sentence for sentence in found if sentence]


def _known(model: ModelReading) -> list[FeatureReading]:
    return [reading for reading in model.features if math.isfinite(reading.cosine)]


def _similarity(model: ModelReading) -> str:
    known = _known(model)
    if len(known) < 2:
        return ""
    first, last = known[0], known[-1]
    change = last.cosine - first.cosine
    word = f"{'more' if change > 0 else 'less'} alike at the end than at the beginning"
    word = word if abs(change) > RISE else "about as alike all along"
    place = "at the input" if first.depth == 0 else f"after layer {first.depth}"
    _, low, high = USUAL_SIMILARITY[-1]
    text = (
        f"Tokens are {word}: mean cosine similarity goes from {first.cosine:.2f} ({place}) to "
        f"{last.cosine:.2f} (after layer {last.depth}; {low} to {high} in plain models of ours)."
    )
    alike = _alike_from(model)
    if alike is not None:
        text += f" It first passes {ALIKE} after layer {alike}: look there for over-smoothing."
    return text


def _alike_from(model: ModelReading) -> int | None:
    """The first layer after which tokens are alike."""
    return next((r.depth for r in model.features if r.depth and r.cosine > ALIKE), None)


def _response(model: ModelReading) -> str:
    spectra = [layer.spectrum for layer in model.attention if layer.spectrum is not None]
    if not spectra:
        return ""
    on_map = percent(passed(row for spectrum in spectra for row in spectrum.map_response))
    on_filter = percent(passed(row for spectrum in spectra for row in spectrum.filter_response))
    low, high = map(percent, USUAL_PASSED)
    with_filters = f"; with its filters {on_filter}" if _filtered(model) else ""
    return (
        f"Its attention maps pass {on_map} of the upper half of the frequencies, relative to "
        f"frequency 0 ({low} to {high} in plain models of ours){with_filters}."
    )


def _filters(model: ModelReading) -> str:
    if not _filtered(model):
        return "No filters are plugged: every head is ordinary attention, low-pass by Theorem 3.1."
    counts = Counter(word for layer in _filtered(model) for word in layer.verdict)
    verdicts = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    moved, where = _largest_move(model)
    unseen = ", which do not show the exclusive term" if _is_exclusive(model) else ""
    return (
        f"Of {counts.total()} filtered heads, by their coefficients{unseen}: {verdicts} "
        f"(Theorem 3.1). The largest move from {_start(model)} is {moved:.2g}, in layer {where}."
    )


def _filtered(model: ModelReading) -> list[AttentionReading]:
    return [layer for layer in model.attention if layer.filter is not None]


def _is_exclusive(model: ModelReading) -> bool:
    return any(layer.own is not None for layer in _filtered(model))


def _start(model: ModelReading) -> str:
    """Where the filters started: a fixed exclusive term is never ordinary attention."""
    return "their start" if _is_exclusive(model) else "ordinary attention"


def _largest_move(model: ModelReading) -> tuple[float, int]:
    """How far the filters are from ordinary attention at most, and in which layer."""
    moves = [(0.0, 0)]
    for layer in _filtered(model):
        moves += [(abs(term), layer.depth) for term in layer.terms]
        for row in layer.coefficients:
            moves += [(abs(c - (power == 1)), layer.depth) for power, c in enumerate(row)]
    return max(moves)


class Headline(NamedTuple):
    """Sentences that compare, and sentences that advise."""

    compares: list[str]
    advises: list[str]

    @property
    def sentences(self) -> list[str]:
        """All of them, in order."""
        return self.compares + self.advises


def headline(models: Sequence[ModelReading]) -> Headline:
    """The headline of a report: models are compared with the plain one, or with the first."""
    named = [model for model in models if model.name.lower().startswith("plain")]
    unfiltered = [model for model in models if not _filtered(model)]
    reference = (named or unfiltered or models)[0]
    start = _last(reference)
    text = (
        f"After the last layer the tokens of {reference.name} have a mean cosine similarity of "
        f"{start:.2f}"
    )
    advises: list[str] = []
    for model in (reference, *(model for model in models if model is not reference)):
        change, as_alike = _last(model) - start, False
        if model is not reference and not math.isnan(change):
            as_alike = abs(change) < DIFFERENCE
            word = "less alike" if change < 0 else "more alike"
            word = "about as alike" if as_alike else word
            text += f"; those of {model.name} ({_last(model):.2f}) are {word}"
        advice = _advice_on(model, as_alike)
        advises += [f"{model.name}: {advice}"] if advice else []
    return Headline([] if math.isnan(start) else [f"{text}."], advises)


def _last(model: ModelReading) -> float:
    """How alike the last tokens of a model are; NaN if that was not measured."""
    known = _known(model)
    return known[-1].cosine if known else math.nan


def _advice_on(model: ModelReading, as_alike: bool) -> str:
    """``as_alike``: the last tokens are as alike as those of the model to compare with."""
    if not _filtered(model):
        alike = _alike_from(model)
        if alike is not None:
            return (
                f"tokens are alike from layer {alike} on; plug filters there, gfsa.plug(model, "
                f"layers=range({alike}, {len(model.attention) + 1})), train, and compare."
            )
        none = "no sign of over-smoothing, which is then no reason to plug filters."
        return none if model.features else ""
    moved, _ = _largest_move(model)
    if not model.filter_parameters:
        return "its filters are fixed: judge them by the task's own metric."
    if moved < HARDLY:
        return (
            f"the filters hardly moved (at most {moved:.2g} from {_start(model)}): raise their "
            "learning rate, filter_lr of gfsa.parameter_groups."
        )
    if moved > FAR:
        return (
            f"some filters are very far from {_start(model)} (by {moved:.2g}): their learning "
            "rate may be too high."
        )
    if as_alike:
        return (
            "the filters moved and tokens stay as alike as without them: judge the filters by the "
            "task's own metric."
        )
    return "the filters moved; the task's own metric shows whether that helps."
