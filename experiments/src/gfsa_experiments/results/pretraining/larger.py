"""A larger size than the one that was tuned: its learning rate, and its gap beside that of 15M.

Both rules are those of plans, from before their runs:

- ``pretrain-46m-rate.txt``: each arm takes its best rate; where that is the lowest or the highest
  that was tried, the page says that nothing beyond it was;
- ``pretrain-scaling-46m.txt``: a difference between sizes below :data:`BETWEEN` nats is not one. It
  is read at as many tokens a parameter, from a line between two lengths of the smaller size, and
  from the fit to the smaller size alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd

from gfsa_experiments.results.number_format import Scale
from gfsa_experiments.results.page_blocks import Block, Bullets, Heading
from gfsa_experiments.results.pretraining.arms import PLAIN, by_size
from gfsa_experiments.results.pretraining.between import are_near
from gfsa_experiments.results.pretraining.controls import Rates, rates
from gfsa_experiments.results.pretraining.fit_words import FITTED
from gfsa_experiments.results.pretraining.gap import Cell, cells, fit_gap
from gfsa_experiments.results.pretraining.study import LARGER_RATE, Study

NATS = Scale(1, 3)
BETWEEN = 0.04
SAME = 1.15
"""Lengths whose tokens a parameter are at most this many times apart are set beside each other."""
SMALLER = "15M"
CHOSEN = 0.002
"""The learning rate that the smaller size was tuned to."""
_PLAN = "[plan](plans/pretrain-scaling-46m.txt)"


def rate_blocks_of_larger(runs: pd.DataFrame) -> list[Block]:
    """The rates of every arm, its best one, and the gap of the best runs."""
    if runs.empty:
        return []
    size, ratio = str(runs["size"].iloc[0]), float(runs.ratio.max())
    found = rates(runs)
    said = [
        f"Validation loss after one epoch ({ratio:.1f} tokens per parameter), seed 0 "
        f"([plan](plans/{LARGER_RATE})). {'. '.join(map(_rates, found))}."
    ]
    best = {own.arm: own.best for own in found if own.best is not None}
    if PLAIN in best:
        for arm, rate in best.items():
            if arm != PLAIN:
                ends = [_test(runs, arm, rate), _test(runs, PLAIN, best[PLAIN])]
                said.append(
                    f"{arm} − plain, each at its best rate: {NATS.signed(ends[0] - ends[1])} on "
                    f"test ({ends[0]:.3f}, {ends[1]:.3f}). One pair: no interval; exploratory."
                )
    others = [own.arm for own in found if own.best != CHOSEN]
    if others:
        said.append(f"The rate of {SMALLER}, {CHOSEN:g}, is not the best one of {_and(others)}.")
    else:
        said.append(f"The rate of {SMALLER}, {CHOSEN:g}, is the best one of every arm.")
    return [Heading(f"Learning rate at {size}"), Bullets(said)]


def _rates(own: Rates) -> str:
    cells_of = [
        f"{'broke down' if math.isnan(loss) else NATS.number(loss)} at {rate:g}"
        for rate, loss in own.losses.items()
    ]
    if own.best is None:
        return f"{own.arm}: {', '.join(cells_of)}"
    beyond = ""
    if len(own.losses) > 1 and own.is_at_edge:
        beyond = f"; nothing {'above' if own.best == max(own.losses) else 'below'} it was tried"
    return f"{own.arm}: {', '.join(cells_of)} (lowest at {own.best:g}{beyond})"


def _test(runs: pd.DataFrame, arm: str, rate: float) -> float:
    (loss,) = runs[(runs.arm == arm) & (runs.lr == rate)].test
    return float(loss)


@dataclass(frozen=True)
class Beside:
    """One length of a larger size beside the same length of the smaller one."""

    arm: str
    cell: Cell
    """Of the larger size."""
    nearest: Cell
    """Of the smaller size."""
    on_the_line: float | None
    """The smaller size's gap at as many tokens a parameter; None if no line is read there."""
    of_fit: float | None
    """That of the fit to the smaller size alone."""

    @property
    def off(self) -> dict[str, float]:
        """By how much the larger size lies off each reading of the smaller one."""
        read = {"line": self.on_the_line, "fit": self.of_fit}
        return {name: self.cell.mean - gap for name, gap in read.items() if gap is not None}

    @property
    def differs(self) -> bool | None:
        """Whether every reading is at :data:`BETWEEN` or more; None if they disagree."""
        above = {abs(off) >= BETWEEN for off in self.off.values()}
        return above.pop() if len(above) == 1 else None


def beside(runs: pd.DataFrame, arm: str) -> list[Beside]:
    """Every length of a larger size that the smaller one has, too, of runs with a tuned plain."""
    found = cells(runs, arm)
    small = [cell for cell in found if cell.size == SMALLER]
    pairs = []
    for cell in found:
        if cell.size == SMALLER or not small:
            continue
        nearest = min(small, key=lambda own: abs(math.log(own.ratio / cell.ratio)))
        if max(nearest.ratio, cell.ratio) > SAME * min(nearest.ratio, cell.ratio):
            continue
        fit = fit_gap(small, draws=1)
        of_fit = None if fit is None else fit.at(cell.ratio).mean
        pairs.append(Beside(arm, cell, nearest, _on_a_line(small, cell.ratio), of_fit))
    return pairs


def _on_a_line(found: Sequence[Cell], ratio: float) -> float | None:
    """The gap between two lengths that are near, over the logarithm of the tokens."""
    for low, high in pairwise(sorted(found, key=lambda cell: cell.ratio)):
        if low.ratio <= ratio <= high.ratio and are_near(low.tokens, high.tokens):
            share = math.log(ratio / low.ratio) / math.log(high.ratio / low.ratio)
            return low.mean + share * (high.mean - low.mean)
    return None


def size_sentences(runs: pd.DataFrame) -> list[str]:
    """What larger sizes show beside the smaller one, a sentence for each length and arm."""
    return [_sentence(one) for arm in FITTED for one in (beside(runs, arm) if len(runs) else [])]


def _sentence(one: Beside) -> str:
    cell, near = one.cell, one.nearest
    read = [f"{NATS.interval(near.interval)} at {near.ratio:.1f} ({_pairs(near)})"]
    if one.on_the_line is not None:
        read.append(f"{NATS.signed(one.on_the_line)} at {cell.ratio:.1f} on a line between lengths")
    if one.of_fit is not None:
        read.append(f"{NATS.signed(one.of_fit)} there by the fit to {SMALLER} alone")
    off, apart = _off(one), _off_the_nearest(one)
    return (
        f"{cell.size} beside {SMALLER}, {cell.ratio:.1f} tokens per parameter, {one.arm} − plain: "
        f"{NATS.interval(cell.interval)} ({_pairs(cell)}); {SMALLER} has {', '.join(read)}. "
        f"{_verdict(one, off)}{apart}. Exploratory."
    )


def _off(one: Beside) -> str:
    return " and ".join(NATS.signed(value) for value in one.off.values())


def _off_the_nearest(one: Beside) -> str:
    """The difference to the nearest length as it was run, where it would decide otherwise."""
    raw = one.cell.mean - one.nearest.mean
    if one.differs is None or (abs(raw) >= BETWEEN) == one.differs:
        return ""
    return f"; {NATS.signed(raw)} off the nearest length itself"


def _verdict(one: Beside, off: str) -> str:
    if not one.off:
        return f"No reading of {SMALLER} at this length, so the rule ({_PLAN}) says nothing"
    rule = f"{BETWEEN} nats ({_PLAN})"
    if one.differs is None:
        return f"It lies off by {off}: on both sides of {rule}, so the rule does not decide"
    if one.differs:
        return f"It lies off by {off}, {rule} or more: by the rule the sizes differ here"
    return f"It lies off by {off}, less than {rule}: by the rule no difference between sizes"


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)


def _pairs(cell: Cell) -> str:
    return f"{len(cell.gaps)} pair{'s' if len(cell.gaps) > 1 else ''}"


def larger_in_short(study: Study, runs: pd.DataFrame) -> str:
    """One sentence for the first page: what larger sizes show, and what of them is not run.

    Args:
        runs: those with a tuned plain model.
    """
    found = [one for arm in FITTED for one in (beside(runs, arm) if len(runs) else [])]
    sizes = [size for size in by_size(study.runs) if size != SMALLER] if len(study.runs) else []
    if not found:
        return f"**Larger sizes:** not known; no length of {SMALLER} was run at another size."
    arms = dict.fromkeys(one.arm for one in found)
    gaps = "; ".join(_gaps(arm, [one for one in found if one.arm == arm]) for arm in arms)
    lacks = [name for name in study.unfinished if name.startswith("pretrain-scaling-")]
    names = [name.removeprefix("pretrain-scaling-").removesuffix(".txt").upper() for name in lacks]
    open_ = sorted((name for name in names if name != SMALLER), key=lambda size: (len(size), size))
    left = [f"other runs of {size}" if size in sizes else size for size in open_]
    rest = f" Not run yet: {_and(left)}." if left else ""
    return (
        f"**Larger sizes ({', '.join(sizes)}), exploratory.** To plain, by size and tokens per "
        f"parameter: {gaps}. {_by_the_rule(found)}"
        f"{_at_as_many_tokens(runs)} "
        "[More](pretraining-details.md#the-gap-by-tokens-per-parameter)."
        f"{rest}"
    )


def _gaps(arm: str, found: Sequence[Beside]) -> str:
    cells_of = [
        f"{NATS.interval(one.cell.interval)} ({one.cell.size}, {one.cell.ratio:.1f}; "
        f"{SMALLER} {_read(one)}; {_pairs(one.cell)})"
        for one in found
    ]
    return f"{arm} {', '.join(cells_of)}"


def _by_the_rule(found: Sequence[Beside]) -> str:
    """Which sizes differ from the smaller one by the plan's rule."""
    words = {
        True: f"differs from {SMALLER}",
        False: f"is not shown to differ from {SMALLER}",
        None: "is not decided",
    }
    said = []
    for size in dict.fromkeys(one.cell.size for one in found):
        answers = {one.differs for one in found if one.cell.size == size and one.off}
        said.append(f"{size} {words[answers.pop() if len(answers) == 1 else None]}")
    alone = any(one.differs for one in found)
    so = ": the gap does not follow from tokens per parameter alone" if alone else ""
    return f"By the rule of the {_PLAN} ({BETWEEN} nats) {_and(said)}{so}."


def _at_as_many_tokens(runs: pd.DataFrame) -> str:
    """The gaps of several sizes after one number of tokens, which is not one of ratios."""
    said = []
    for arm in FITTED:
        by_tokens: dict[int, list[Cell]] = {}
        for cell in cells(runs, arm):
            by_tokens.setdefault(cell.tokens, []).append(cell)
        for tokens, own in sorted(by_tokens.items()):
            if len(own) > 1:
                gaps = ", ".join(f"{NATS.signed(cell.mean)} at {cell.size}" for cell in own)
                said.append(f"{arm} after {tokens / 1e6:.0f}M {gaps}")
    return f" By tokens: {'; '.join(said)}." if said else ""


def _read(one: Beside) -> str:
    gap = one.nearest.mean if one.on_the_line is None else one.on_the_line
    return NATS.signed(gap)
