"""The first sentences of a report: how its models compare, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from gfsa.lens.findings import ALIKE, high_gain, largest_move
from gfsa.lens.readings import ModelReading
from gfsa.lens.trajectory import Trajectory

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
        found.compares += [*_similarity(reference, others), *_response(reference, others)]
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


def _similarity(reference: ModelReading, others: Sequence[ModelReading]) -> list[str]:
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


def _response(reference: ModelReading, others: Sequence[ModelReading]) -> list[str]:
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
