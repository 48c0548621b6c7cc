"""Readings as text: a table of the numbers, sentences about them, and what to do next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from gfsa.lens.readings import (
    USUAL_SIMILARITY,
    AttentionReading,
    FeatureReading,
    ModelReading,
    Numbers,
)
from gfsa.lens.trajectory import Trajectory

_SHORT = {"low-pass": "low", "high-pass": "high", "all-pass": "all", "mixed": "mix"}
_OF_FEATURES = ("cosine", "rank", "residual", "norm")
_OF_ATTENTION = ("entropy", "energy", "high", "filter")
_OF_OWN = ("p", "A_ii", "cos(y, v)")


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
    has_own = any(reading.own is not None for reading in model.attention)
    features = {reading.depth: reading for reading in model.features}
    attention = {reading.depth: reading for reading in model.attention}
    found = [["layer", *_OF_FEATURES, *_OF_ATTENTION, *(_OF_OWN if has_own else ())]]
    for depth in sorted(features.keys() | attention.keys()):
        cells = ["input" if depth == 0 else str(depth)]
        cells += _feature_cells(features[depth]) if depth in features else [""] * 4
        cells += _attention_cells(attention[depth]) if depth in attention else [""] * 4
        own = attention[depth].own if depth in attention else None
        if own is not None:
            cells += [_mean(heads, ".3f") for heads in (own.part, own.weight, own.cosine)]
        found.append(cells + [""] * (len(found[0]) - len(cells)))
    return found


def _feature_cells(reading: FeatureReading) -> list[str]:
    return [
        _number(reading.cosine, ".3f"),
        _number(reading.effective_rank, ".1f"),
        _number(reading.residual, ".3f"),
        _number(reading.norm, ".2f"),
    ]


def _attention_cells(reading: AttentionReading) -> list[str]:
    high, verdicts = "", "none"
    if reading.spectrum is not None:
        high = percent(passed(reading.spectrum.map_response))
    if reading.filter is not None:
        if reading.spectrum is not None:
            high += f"→{percent(passed(reading.spectrum.filter_response))}"
        counts = Counter(reading.verdict).most_common()
        verdicts = " ".join(f"{count} {_SHORT[word]}" for word, count in counts)
    energy = f"{_mean(reading.energy_before, '.2f')}→{_mean(reading.energy_after, '.2f')}"
    return [_mean(reading.entropy_share, ".2f"), energy, high, verdicts]


def _mean(heads: Numbers, form: str) -> str:
    return _number(fmean(heads), form)


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"


# similarities above which tokens are called alike, and that differ
ALIKE = 0.9
RISE = 0.1
DIFFERENCE = 0.05
# the share of directions below which most have collapsed
FEW = 0.1
# distances of coefficients from ordinary attention
HARDLY = 0.01
FAR = 5.0

# what plain models that we trained pass of high frequencies
USUAL_PASSED = (0.19, 0.45)


def findings(model: ModelReading) -> list[str]:
    """Sentences about the readings of one model, the most important first."""
    sentences = []
    if model.features:
        sentences += [_similarity(model), _rank(model)]
    if model.attention:
        sentences += [_response(model), _filters(model), *_entropy(model)]
    return [sentence for sentence in sentences if sentence]


def _similarity(model: ModelReading) -> str:
    known = [reading for reading in model.features if math.isfinite(reading.cosine)]
    if len(known) < 2:
        return ""
    first, last = known[0], known[-1]
    word = "about as alike all along"
    if abs(last.cosine - first.cosine) > RISE:
        less = "more" if last.cosine > first.cosine else "less"
        word = f"{less} alike at the end than at the beginning"
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


def _response(model: ModelReading) -> str:
    spectra = [layer.spectrum for layer in model.attention if layer.spectrum is not None]
    if not spectra:
        return ""
    on_map, on_filter = (
        percent(passed(row for rows in responses for row in rows))
        for responses in zip(*((s.map_response, s.filter_response) for s in spectra), strict=True)
    )
    low, high = map(percent, USUAL_PASSED)
    with_filters = f"; with its filters {on_filter}" if _is_filtered(model) else ""
    return (
        f"Its attention maps pass {on_map} of the upper half of the frequencies, relative to "
        f"frequency 0 ({low} to {high} in plain models of ours){with_filters}."
    )


def _filters(model: ModelReading) -> str:
    if not _is_filtered(model):
        return "No filters are plugged: every head is ordinary attention, low-pass by Theorem 3.1."
    counts = Counter(word for layer in _filtered(model) for word in layer.verdict)
    verdicts = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    moved, where = _largest_move(model)
    return (
        f"Of {sum(counts.values())} filtered heads, by their coefficients: {verdicts} "
        f"(Theorem 3.1). The largest move from ordinary attention is {moved:.2g}, in layer {where}."
    )


def _filtered(model: ModelReading) -> list[AttentionReading]:
    return [layer for layer in model.attention if layer.filter is not None]


def _is_filtered(model: ModelReading) -> bool:
    return bool(_filtered(model))


def _largest_move(model: ModelReading) -> tuple[float, int]:
    """How far the filters are from ordinary attention at most, and in which layer."""
    return max(
        (abs(c - (1.0 if power == 1 else 0.0)), layer.depth)
        for layer in _filtered(model)
        for row in layer.coefficients
        for power, c in enumerate(row)
    )


def _entropy(model: ModelReading) -> list[str]:
    shares = [share for layer in model.attention for share in layer.entropy_share]
    uniform, single = sum(s > 0.98 for s in shares), sum(s < 0.02 for s in shares)
    found = []
    if uniform:
        found.append(
            f"{uniform} of {len(shares)} heads attend almost uniformly: they average tokens."
        )
    if single:
        found.append(f"{single} of {len(shares)} heads attend to a single token almost always.")
    return found


@dataclass
class Headline:
    """Sentences that compare, and sentences that advise."""

    compares: list[str] = field(default_factory=list)
    advises: list[str] = field(default_factory=list)

    @property
    def sentences(self) -> list[str]:
        """All of them, in order."""
        return self.compares + self.advises


def headline(
    models: Sequence[ModelReading], trajectories: Mapping[str, Trajectory] | None = None
) -> Headline:
    """The headline of a report.

    Args:
        models: the readings; the others are compared with the plain model, or the first one.
        trajectories: coefficients over training, by name.
    """
    found = Headline()
    if models:
        named = [model for model in models if model.name.lower().startswith("plain")]
        unfiltered = [model for model in models if not _is_filtered(model)]
        reference = (named or unfiltered or list(models))[0]
        ordered = [reference, *(model for model in models if model is not reference)]
        found.compares += _compared(ordered)
        found.advises += _advice(ordered)
    for name, trajectory in (trajectories or {}).items():
        found.compares += _path(name, trajectory)
    return found


def _last_cosine(model: ModelReading) -> float | None:
    known = [reading.cosine for reading in model.features if math.isfinite(reading.cosine)]
    return known[-1] if known else None


def _compared(models: Sequence[ModelReading]) -> list[str]:
    """How alike the last tokens of each model are; the first is the one to compare with."""
    start = _last_cosine(models[0])
    if start is None:
        return []
    parts = [
        f"After the last layer the tokens of {models[0].name} have a mean cosine similarity of "
        f"{start:.2f}"
    ]
    groups: dict[str, list[str]] = {}
    for model in models[1:]:
        end = _last_cosine(model)
        if end is not None:
            word = "less alike" if end < start else "more alike"
            word = word if abs(end - start) >= DIFFERENCE else "about as alike"
            groups.setdefault(word, []).append(f"{model.name} ({end:.2f})")
    parts += [f"those of {_listed(names)} are {word}" for word, names in groups.items()]
    return [f"{'; '.join(parts)}."]


def _listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, or ``a, b and c``."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _advice(models: Sequence[ModelReading]) -> list[str]:
    """A sentence for each model; models with the same advice share it."""
    advice: dict[str, list[str]] = {}
    start = _last_cosine(models[0])
    for model in models:
        end = _last_cosine(model)
        same = start is not None and end is not None and abs(end - start) < DIFFERENCE
        text = _advice_on(model, same and model is not models[0])
        if text:
            advice.setdefault(text, []).append(model.name)
    return [f"{_listed(names)}: {text}" for text, names in advice.items()]


def _advice_on(model: ModelReading, same: bool) -> str:
    if not _is_filtered(model):
        alike = _alike_from(model)
        if alike is not None:
            return (
                f"tokens are alike from layer {alike} on; plug filters there, "
                f"gfsa.plug(model, layers=range({alike}, …)), train, and compare."
            )
        if not model.features:
            return ""
        return "no sign of over-smoothing, which is then no reason to plug filters."
    if not model.filter_parameters:
        return "its filters are fixed: judge them by the task's own metric."
    moved, _ = _largest_move(model)
    if moved < HARDLY:
        return (
            f"the filters hardly moved (at most {moved:.2g} from ordinary attention): raise their "
            "learning rate, filter_lr of gfsa.parameter_groups."
        )
    if moved > FAR:
        return (
            f"some filters are very far from ordinary attention (by {moved:.2g}): their learning "
            "rate may be too high."
        )
    if same:
        return (
            "the filters moved and tokens stay as alike as without them: judge the filters by the "
            "task's own metric."
        )
    return "the filters moved; the task's own metric shows whether that helps."


def _path(name: str, trajectory: Trajectory) -> list[str]:
    """Where training moved the mean coefficients, and how many heads subtract the token itself."""
    if len(trajectory.steps) < 2 or not trajectory.layers:
        return []
    first, last = (_mean_row(trajectory, at) for at in (0, -1))
    heads = [row for layer in trajectory.layers for row in layer.coefficients[-1]]
    below = f"below 0 in {sum(row[0] < 0 for row in heads)} of {len(heads)} heads"
    sign = below if any(row[0] for row in heads) else "0 in every head"
    return [
        f"{name}: over {trajectory.steps[-1]:,} steps the mean coefficients went from "
        f"({first}) to ({last}); c0 is {sign}."
    ]


def _mean_row(trajectory: Trajectory, at: int) -> str:
    rows = [row for layer in trajectory.layers for row in layer.coefficients[at]]
    means = [fmean(r[k] for r in rows if k < len(r)) for k in range(max(map(len, rows)))]
    return ", ".join(f"{mean:.2f}".replace("-", "−") for mean in means)
