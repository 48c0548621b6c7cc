"""How many fewer tokens, and how much less time, a filtered model needs for plain's final loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from gfsa_experiments.results.pretraining.arms import PLAIN, by_size
from gfsa_experiments.results.pretraining.between import tokens_to_reach
from gfsa_experiments.results.pretraining.collect import RUN
from gfsa_experiments.results.pretraining.speeds import speed_at
from gfsa_experiments.results.statistics import Interval, mean_of_groups


@dataclass(frozen=True)
class Saving:
    """An arm against plain's longest run of one size, seed by seed."""

    size: str
    arm: str
    tokens: int
    """Of the run whose final loss is to be reached."""
    shares: dict[int, float | None]
    """By seed: the share of plain's tokens after which the arm is at plain's final loss; None if it
    never is (validations are near each other)."""
    step_time: float | None
    """The arm's time of a token as a multiple of plain's; None if it was not measured."""
    step_batch: int | None
    """The batch size at which it was measured."""

    @property
    def reached(self) -> int:
        return sum(share is not None for share in self.shares.values())

    @property
    def share(self) -> Interval | None:
        """The mean share over seeds; None unless all of them reach plain's loss."""
        values = [share for share in self.shares.values() if share is not None]
        return mean_of_groups([values]) if len(values) == len(self.shares) else None

    @property
    def time(self) -> Interval | None:
        """The same of time."""
        share, factor = self.share, self.step_time
        return None if share is None or factor is None else share.times(factor)


def savings(
    curves: pd.DataFrame,
    runs: pd.DataFrame,
    arm: str,
    speeds: Mapping[tuple[str, str, int], float],
) -> list[Saving]:
    """Every size's longest comparison, by the curves of validation loss.

    A curve on its way is above what a run of that length and a good schedule would end with,
    because its learning rate has not fallen yet: what is saved is understated.
    """
    found = []
    for size in by_size(runs) if len(runs) else []:
        own = runs[runs["size"] == size]
        plain, filtered = own[own.arm == PLAIN], own[own.arm == arm]
        pairs = plain.merge(filtered, on=["tokens", "seed"], suffixes=("", "_of_arm"))
        pairs = pairs[pairs.tokens == pairs.tokens.max()]
        shares: dict[int, float | None] = {}
        for pair in pairs.to_dict("records"):
            lines = [curve_of(curves, {name: pair[name] for name in RUN})]
            lines.append(
                curve_of(curves, {name: pair.get(f"{name}_of_arm", pair[name]) for name in RUN})
            )
            if not all(len(line) for line in lines):
                continue
            target = float(lines[0]["valid loss"].iloc[-1])
            tokens = tokens_to_reach(lines[1].tokens, lines[1]["valid loss"], target)
            whole = float(lines[0].tokens.iloc[-1])
            shares[int(pair["seed"])] = None if tokens is None else tokens / whole
        if shares:
            batch = int(pairs.batch_size.iloc[0])
            times = [speed_at(speeds, size, name, batch) for name in (PLAIN, arm)]
            ratio, measured = None, None
            if times[0] is not None and times[1] is not None and times[0][1] == times[1][1]:
                ratio, measured = times[0][0] / times[1][0], times[0][1]
            whole_tokens = int(pairs.tokens.iloc[0])
            found.append(Saving(size, arm, whole_tokens, shares, ratio, measured))
    return found


def curve_of(curves: pd.DataFrame, run: Mapping[str, object]) -> pd.DataFrame:
    """The validations of one run, in order; none if it left no curve."""
    own = curves
    for name, value in run.items():
        if own.empty:
            # a table without a line may lack the columns too
            return own
        own = own[own[name] == value]
    return own.astype({"tokens": float, "valid loss": float}).sort_values("tokens")


def savings_of_ends(runs: pd.DataFrame, arm: str, size: str) -> dict[float, float]:
    """The share of the tokens with which the arm ends at plain's loss, by tokens per parameter.

    Losses at the end of runs of different lengths, interpolated over the logarithm of the tokens:
    every one has its whole schedule. A length is left out if the arm has no runs of it, if the
    arm's shortest runs are at plain's loss already (how far before is not known), if none is, or if
    the arm is there between two lengths that are far apart (:mod:`.between`).
    """
    own = runs[runs["size"] == size]
    ends = {
        name: own[own.arm == name].groupby("tokens")[["test", "ratio"]].mean().sort_index()
        for name in (PLAIN, arm)
    }
    plain, filtered = ends[PLAIN], ends[arm]
    shares = {}
    for tokens in plain.index.intersection(filtered.index):
        target = float(plain.test[tokens])
        if float(filtered.test.iloc[0]) <= target:
            continue
        needed = tokens_to_reach(list(filtered.index), list(filtered.test), target)
        if needed is not None:
            shares[float(plain.ratio[tokens])] = needed / float(tokens)
    return shares
