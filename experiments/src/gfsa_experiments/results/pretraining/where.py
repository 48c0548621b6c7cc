"""Where trained models differ from plain, by their probes, in a paragraph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gfsa_experiments.results.number_format import Scale
from gfsa_experiments.results.pretraining.arms import arms_of, by_size, longest_compared
from gfsa_experiments.results.pretraining.collect import RUN
from gfsa_experiments.results.pretraining.fit_words import FITTED
from gfsa_experiments.results.pretraining.probes import Measure, measures
from gfsa_experiments.results.pretraining.study import Study

NATS = Scale(1, 3)
COPYING = ("loss, repeated random tokens, second time", "loss, recalled pairs, second time")
"""What a model can only know from an earlier place of the same row."""
_AGAIN = ", second time"
_FIRST = ", first time"
_LOSS = "loss, "
WORDS = {
    "loss, middle tenths": "tokens of middle frequency",
    "loss, most frequent tenth": "the most frequent tenth of tokens",
    "loss, rarest tenth of tokens": "the rarest tenth of tokens",
}


@dataclass(frozen=True)
class Probed:
    """The probes of the smallest size's longest runs that more than one arm has."""

    size: str
    tokens: int
    ratio: float
    """Tokens per parameter."""
    measures: list[Measure]
    arms: list[str]
    """Those with a difference to plain."""


def longest_probed(study: Study) -> Probed | None:
    """None without probes of plain and another arm."""
    if study.probes.empty:
        return None
    runs = study.runs.merge(study.probes[RUN].drop_duplicates(), on=RUN)
    size = by_size(runs)[0]
    own = runs[runs["size"] == size]
    tokens = longest_compared(own)
    chosen = own[own.tokens == tokens]
    found = measures(study.probes.merge(chosen[RUN], on=RUN))
    arms = [arm for arm in arms_of(chosen) if any(arm in m.differences for m in found)]
    ratio = float(chosen.ratio.max())
    return Probed(size, tokens, ratio, found, arms) if arms else None


def where(study: Study) -> str:
    """Which measures of filtered models differ from plain beyond their interval, and which do not.

    Empty without probes of several seeds.
    """
    found = longest_probed(study)
    arms = [] if found is None else [arm for arm in FITTED if arm in found.arms]
    if found is None or not arms:
        return ""
    known = [m for m in found.measures if all(_has_interval(m, arm) for arm in arms)]
    # what stands there for the first time cannot be copied: it says nothing of the model's use
    known = [measure for measure in known if not measure.name.endswith(_FIRST)]
    if not known:
        return ""
    said = [_differs(arm, known) for arm in arms]
    copying = [measure for measure in known if measure.name in COPYING]
    if copying:
        said.append(_copies(arms, copying))
    rest = [
        _short(m.name)
        for m in known
        if m.name not in COPYING and not any(_excludes(m, arm) for arm in arms)
    ]
    if rest:
        said.append(f"Not shown to differ, either: {', '.join(rest)}.")
    return (
        f"**Where filtered models differ from plain** (probes after {found.ratio:.1f} tokens per "
        "parameter, paired differences whose 95 % interval excludes 0; exploratory, "
        f"[table](pretraining-details.md#probes-of-the-trained-models)): {' '.join(said)}"
    )


def _differs(arm: str, known: Sequence[Measure]) -> str:
    losses, parts = [], []
    for measure in known:
        if measure.name in COPYING or not _excludes(measure, arm):
            continue
        mean = measure.differences[arm].mean
        if measure.name.startswith(_LOSS):
            losses.append(f"{_short(measure.name)} {NATS.signed(mean)}")
        else:
            ends = (NATS.number(measure.plain), NATS.number(measure.plain + mean))
            parts.append(f"{measure.name} {' → '.join(ends)}")
    if losses:
        parts.insert(0, f"loss of {', '.join(losses)}")
    name = arm[0].upper() + arm[1:]
    return f"{name}: {'; '.join(parts)}." if parts else f"{name}: none."


def _copies(arms: Sequence[str], copying: Sequence[Measure]) -> str:
    shown = [
        f"{arm}, {_short(measure.name)} {NATS.signed(measure.differences[arm].mean)}"
        for measure in copying
        for arm in arms
        if _excludes(measure, arm)
    ]
    if shown:
        return f"Copying from earlier in the row differs: {'; '.join(shown)}."
    names = " and ".join(_short(measure.name) for measure in copying)
    return f"Copying from earlier in the row ({names}) is not shown to differ."


def _short(name: str) -> str:
    """``loss, repeated random tokens, second time`` → ``repeated random tokens``"""
    return WORDS.get(name, name.removeprefix(_LOSS).removesuffix(_AGAIN))


def _has_interval(measure: Measure, arm: str) -> bool:
    return arm in measure.differences and measure.differences[arm].low is not None


def _excludes(measure: Measure, arm: str) -> bool:
    return measure.differences[arm].interval.excludes_zero
