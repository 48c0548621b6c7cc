"""What the long runs pass on the way: the gap to plain after as many tokens as short runs have.

A short run with a schedule of its own is a fair measure of its arm only if that schedule suits it.
Where the long runs of plain are lower on their way, with a learning rate that has not fallen yet,
than plain's short runs end, it does not: another schedule is better for plain, and the gap of the
short runs is not one to a tuned plain model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from gfsa_experiments.results.number_format import NONE, Scale
from gfsa_experiments.results.page_blocks import Block, Grid, Heading, Text
from gfsa_experiments.results.pretraining.arms import PLAIN, arms_of, by_size
from gfsa_experiments.results.pretraining.between import loss_after
from gfsa_experiments.results.pretraining.collect import RUN
from gfsa_experiments.results.pretraining.savings import curve_of
from gfsa_experiments.results.statistics import PairedDifference, paired_difference

NATS = Scale(1, 3)
BySeed = dict[int, float]


@dataclass(frozen=True)
class Passing:
    """One length of a size: runs that end there, and the size's longest runs, which pass it."""

    size: str
    tokens: int
    ratio: float
    """Tokens per parameter."""
    ending: float
    """The mean validation loss of plain's runs that end there."""
    on_the_way: float
    """That of plain's longest runs after as many tokens."""
    gaps_of_ends: dict[str, PairedDifference]
    """Arm − plain by arm, of runs that end there."""
    gaps_on_the_way: dict[str, PairedDifference]

    @property
    def shows_untuned_plain(self) -> bool:
        """Whether plain's long runs are lower on their way than its runs that end there."""
        return self.on_the_way < self.ending


def passings(curves: pd.DataFrame, runs: pd.DataFrame) -> list[Passing]:
    """Every length that is shorter than a size's longest comparison, and on its curves.

    Args:
        curves: lines of ``curves.csv``.
        runs: those of the study, with ``valid`` at their end.
    """
    found = []
    for size in by_size(runs) if len(runs) else []:
        own = runs[runs["size"] == size]
        long = _longest(own)
        for tokens in sorted(own[own.tokens < long.tokens.max()].tokens.unique()):
            ending = own[own.tokens == tokens]
            ends, way = _by_arm(ending), _on_the_way(curves, long, float(tokens))
            if PLAIN not in ends or PLAIN not in way:
                continue
            found.append(
                Passing(
                    size,
                    int(tokens),
                    float(ending[ending.arm == PLAIN].ratio.iloc[0]),
                    _mean(ends[PLAIN]),
                    _mean(way[PLAIN]),
                    _gaps(ends),
                    _gaps(way),
                )
            )
    return found


def gaps_on_the_way(
    curves: pd.DataFrame, runs: pd.DataFrame, size: str
) -> dict[float, dict[str, PairedDifference]]:
    """Arm − plain at every validation of a size's longest runs, by tokens per parameter."""
    long = _longest(runs[runs["size"] == size])
    plain = long[long.arm == PLAIN]
    found = {}
    for run in plain[:1].to_dict("records"):
        for tokens in curve_of(curves, {name: run[name] for name in RUN}).get("tokens", ()):
            losses = _on_the_way(curves, long, float(tokens))
            found[float(tokens) * run["ratio"] / run["tokens"]] = _gaps(losses)
    return found


def with_tuned_plain(runs: pd.DataFrame, found: list[Passing]) -> pd.DataFrame:
    """The runs without those lengths of a size at which plain is shown not to be tuned."""
    untuned = {(one.size, one.tokens) for one in found if one.shows_untuned_plain}
    places = zip(runs["size"], runs.tokens, strict=True)
    return runs[[place not in untuned for place in places]]


def _longest(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of the longest length that more than one arm has; plain may have a longer one."""
    shared = runs.groupby("tokens").arm.nunique()
    return runs[runs.tokens == shared[shared > 1].index.max()]


def _by_arm(runs: pd.DataFrame) -> dict[str, BySeed]:
    return {
        arm: {
            int(seed): float(loss)
            for own_arm, seed, loss in zip(runs.arm, runs.seed, runs.valid, strict=True)
            if own_arm == arm
        }
        for arm in arms_of(runs)
    }


def _on_the_way(curves: pd.DataFrame, runs: pd.DataFrame, tokens: float) -> dict[str, BySeed]:
    """By arm and seed: the validation loss of these runs after ``tokens``, where it is known."""
    found: dict[str, dict[int, float]] = {}
    for run in runs.to_dict("records"):
        curve = curve_of(curves, {name: run[name] for name in RUN})
        if curve.empty:
            continue
        loss = loss_after(list(curve.tokens), list(curve["valid loss"]), tokens)
        if loss is not None:
            found.setdefault(str(run["arm"]), {})[int(run["seed"])] = loss
    return found


def _gaps(losses: Mapping[str, BySeed]) -> dict[str, PairedDifference]:
    pairs = {
        arm: paired_difference(losses[PLAIN], own, higher_is_better=False)
        for arm, own in losses.items()
        if arm != PLAIN
    }
    return {arm: pair for arm, pair in pairs.items() if pair is not None}


def _mean(values: BySeed) -> float:
    return sum(values.values()) / len(values)


def passing_blocks(found: list[Passing], arms: tuple[str, ...]) -> list[Block]:
    """The table of these arms, and which short runs have no tuned plain model to be compared to."""
    shown = [arm for arm in arms if any(arm in one.gaps_on_the_way for one in found)]
    if not shown:
        return []
    text = (
        "Validation loss in nats. *Ends*: runs of that length, with a schedule of their own. "
        "*On the way*: the longest runs after as many tokens, on a line between two validations; "
        "their learning rate has not fallen yet. Differences are paired by seed. Exploratory."
    )
    columns = ["size", "tokens per parameter", f"{PLAIN} ends", f"{PLAIN} on the way"]
    for arm in shown:
        columns += [f"{arm} − plain, ends", f"{arm} − plain, on the way"]
    rows = []
    for one in found:
        cells = [one.size, f"{one.ratio:.1f}", f"{one.ending:.3f}", f"{one.on_the_way:.3f}"]
        for arm in shown:
            pairs = one.gaps_of_ends.get(arm), one.gaps_on_the_way.get(arm)
            cells += [NONE if pair is None else NATS.interval(pair.interval) for pair in pairs]
        rows.append(cells)
    blocks: list[Block] = [Heading("What the long runs pass on the way"), Text(text)]
    blocks.append(Grid(columns, rows, ("size",)))
    untuned = [one for one in found if one.shows_untuned_plain]
    if untuned:
        blocks.append(Text(_not_tuned(untuned)))
    return blocks


def _not_tuned(found: list[Passing]) -> str:
    ratios: dict[str, list[str]] = {}
    for one in found:
        ratios.setdefault(one.size, []).append(f"{one.ratio:.1f}")
    places = "; ".join(f"{size}: {' and '.join(own)}" for size, own in ratios.items())
    below = " and ".join(f"{one.ending - one.on_the_way:.2f}" for one in found)
    return (
        f"**Short runs are not against a tuned plain model** ({places} tokens per parameter): "
        f"plain's long runs are {below} nats lower there, before their rate has fallen, than its "
        "short runs end. What filters gain on such runs is no measure of what they bring, and "
        "nothing is fitted to it; the gap between tuned runs of that length is not known "
        "([plan](plans/pretrain-warmup.txt))."
    )
