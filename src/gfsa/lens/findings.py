"""The readings in sentences: about each model, how models compare, and what to do next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from gfsa.lens.readings import AttentionReading, ModelReading
from gfsa.lens.trajectory import Trajectory

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


# rules of thumb, as those of findings.py (docs/lens.md says so)
DIFFERENCE = 0.05
HARDLY = 0.01
FAR = 5.0


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
        reference = _reference(models)
        others = [model for model in models if model is not reference]
        found.compares += [
            *_compared_similarity(reference, others),
            *_compared_response(reference, others),
        ]
        found.advises += _advice(reference, others)
    for name, trajectory in (trajectories or {}).items():
        found.compares += _path(name, trajectory)
    return found


def _reference(models: Sequence[ModelReading]) -> ModelReading:
    named = [model for model in models if model.name.lower().startswith("plain")]
    unfiltered = [model for model in models if not _is_filtered(model)]
    return (named or unfiltered or list(models))[0]


def _is_filtered(model: ModelReading) -> bool:
    return any(layer.filter is not None for layer in model.attention)


def _last_cosine(model: ModelReading) -> float | None:
    known = [reading.cosine for reading in model.features if math.isfinite(reading.cosine)]
    return known[-1] if known else None


def _compared_similarity(reference: ModelReading, others: Sequence[ModelReading]) -> list[str]:
    start = _last_cosine(reference)
    if start is None:
        return []
    text = (
        f"After the last layer the tokens of {reference.name} have a mean cosine similarity of "
        f"{start:.2f}"
    )
    groups: dict[str, list[str]] = {}
    for model in others:
        end = _last_cosine(model)
        if end is not None:
            groups.setdefault(_alike(end - start), []).append(f"{model.name} ({end:.2f})")
    words = [f"those of {_listed(names)} are {word}" for word, names in groups.items()]
    return [f"{'; '.join([text, *words])}."]


def _listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, or ``a, b and c``."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _alike(change: float) -> str:
    if abs(change) < DIFFERENCE:
        return "about as alike"
    return "less alike" if change < 0 else "more alike"


def _compared_response(reference: ModelReading, others: Sequence[ModelReading]) -> list[str]:
    gains = []
    for model in (reference, *others):
        rows = [
            high_gain(row)
            for layer in model.attention
            if layer.spectrum is not None
            for row in layer.spectrum.filter_response
        ]
        if rows:
            gains.append(f"{fmean(rows):.0%} in {model.name}")
    return [f"High frequencies pass with a mean gain of {', '.join(gains)}."] if gains else []


def _advice(reference: ModelReading, others: Sequence[ModelReading]) -> list[str]:
    models = [reference, *others]
    if not any(_is_filtered(model) for model in models):
        return [_advice_without_filters(model) for model in models if model.features]
    advice: dict[str, list[str]] = {}
    start = _last_cosine(reference)
    for model in filter(_is_filtered, models):
        end = _last_cosine(model)
        same = model is not reference and _close(start, end)
        advice.setdefault(_advice_on(model, same), []).append(model.name)
    return [f"{_listed(names)}: {text}" for text, names in advice.items()]


def _close(start: float | None, end: float | None) -> bool:
    """Whether two similarities are known and about the same."""
    return start is not None and end is not None and abs(end - start) < DIFFERENCE


def _advice_without_filters(model: ModelReading) -> str:
    alike = [r.depth for r in model.features if r.depth and r.cosine > ALIKE]
    if alike:
        return (
            f"{model.name}: tokens are alike from layer {alike[0]} on; plug filters there, "
            f"gfsa.plug(model, layers=range({alike[0]}, …)), train, and compare."
        )
    return f"{model.name}: no sign of over-smoothing, which is then no reason to plug filters."


def _advice_on(model: ModelReading, same: bool) -> str:
    if not model.filter_parameters:
        return "its filters are fixed: judge them by the task's own metric."
    moved, _ = largest_move(model)
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
    path = (
        f"{name}: over {trajectory.steps[-1]:,} steps the mean coefficients went from "
        f"({first}) to ({last})"
    )
    if not any(row[0] for row in heads):
        return [f"{path}; c0 is 0 in every head."]
    negative = sum(row[0] < 0 for row in heads)
    return [f"{path}; c0 is below 0 in {negative} of {len(heads)} heads."]


def _mean_row(trajectory: Trajectory, at: int) -> str:
    columns: list[list[float]] = [[] for _ in range(trajectory.powers)]
    for layer in trajectory.layers:
        for row in layer.coefficients[at]:
            for column, value in zip(columns, row, strict=False):
                column.append(value)
    return ", ".join(f"{fmean(column):.2f}".replace("-", "−") for column in columns)
