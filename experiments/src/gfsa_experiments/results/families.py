"""Families of confirmatory comparisons, written down in ``families/NAME.toml`` before their runs.

docs/results.md has an example. ``recipe``, ``metric``, ``seeds`` and ``settings`` are of every
comparison, unless it has its own; a line is a method with its options and settings of its own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from gfsa_experiments.results.statistics import LEVEL, Contrast, contrast, finite, holm
from gfsa_experiments.results.tables import Line
from gfsa_experiments.runs.run import Key
from gfsa_experiments.runs.sweep import Request, numbers_of

# Python 3.10 has no reader of TOML
tomllib: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

# lower seeds are for tuning and exploration
_FIRST_SEED = 100
_KEY = list(Key._fields)
_SHARED = ("recipe", "metric", "seeds", "settings")
_TOP = {"title", "registered", "withdrawn", *_SHARED, "lines", "comparison"}


@dataclass(frozen=True)
class Comparison:
    """``a − b`` on one metric over fresh seeds; each line has one run per seed."""

    a: str
    b: str
    metric: str
    seeds: tuple[int, ...]
    keys: dict[str, list[Key]]
    """The runs of both lines, in the order of the seeds."""
    plan: dict[str, str]
    """The arguments of ``gfsa train`` for the runs of each line."""

    @property
    def name(self) -> str:
        return f"{self.a} − {self.b}"

    @property
    def tasks(self) -> set[tuple[str, str]]:
        """The recipe and task of both lines; a deeper model may be another task."""
        return {keys[0][:2] for keys in self.keys.values()}


@dataclass(frozen=True)
class Family:
    path: Path
    title: str
    registered: datetime | None
    """None while the family is planned."""
    comparisons: tuple[Comparison, ...]
    withdrawn: str = ""
    """Why it will not be run; empty for all others."""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def plan(self) -> list[str]:
        """The arguments of ``gfsa train`` for all runs."""
        return list(dict.fromkeys(x for c in self.comparisons for x in c.plan.values()))

    @property
    def keys(self) -> set[Key]:
        return {key for c in self.comparisons for keys in c.keys.values() for key in keys}


def read_families(folder: Path) -> list[Family]:
    """The families of a folder of rows, each checked by itself."""
    return [read_family(path) for path in sorted((folder / "families").glob("*.toml"))]


def read_family(path: Path) -> Family:
    """One family; a ValueError names the file and what is wrong in it."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        _refuse_unknown("the file", content, _TOP)
        if not content.get("comparison"):
            raise ValueError("expected at least one [[comparison]] with a and b, got none")
        registered, withdrawn = content.get("registered"), content.get("withdrawn", "")
        if registered is not None and not (isinstance(registered, datetime) and registered.tzinfo):
            raise ValueError(
                "registered is a time with its zone such as 2026-12-01T08:00:00Z, "
                f"got {registered!r}; leave it out while the family is planned"
            )
        if "withdrawn" in content and not (isinstance(withdrawn, str) and withdrawn.strip()):
            raise ValueError(f"withdrawn is the reason in words, got {withdrawn!r}")
        comparisons = tuple(_comparison(content, own) for own in content["comparison"])
        pairs = {frozenset(map(tuple, found.keys.values())) for found in comparisons}
        if len(pairs) < len(comparisons):
            raise ValueError(
                "a comparison is listed twice; it would count twice in Holm's correction"
            )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Family(path, content.get("title", path.stem), registered, comparisons, withdrawn)


def _comparison(content: dict[str, Any], own: dict[str, Any]) -> Comparison:
    _refuse_unknown("a [[comparison]]", own, {"a", "b", *_SHARED})
    given = {"settings": "", **{name: content[name] for name in _SHARED if name in content}, **own}
    lacking = [name for name in (*_SHARED, "a", "b") if name not in given]
    if lacking:
        raise ValueError(f"a [[comparison]] lacks {', '.join(lacking)}")
    seeds = numbers_of("seeds", str(given["seeds"]))
    if min(seeds) < _FIRST_SEED or len(seeds) < 2:
        raise ValueError(
            f"seeds must be two or more fresh ones from {_FIRST_SEED} on, got {given['seeds']}: "
            "lower seeds are for tuning and exploration"
        )
    a, b = given["a"], given["b"]
    if a == b:
        raise ValueError(f"a and b are both {a!r}; a comparison needs two lines")
    lines, keys, plan = content.get("lines", {}), {}, {}
    for name in (a, b):
        if name not in lines:
            raise ValueError(f"there is no line {name!r} in [lines]; there are {', '.join(lines)}")
        method, *words = lines[name].split()
        # a line's own settings count
        overridden = {word.split("=")[0] for word in words}
        shared = [
            word for word in given["settings"].split() if word.split("=")[0] not in overridden
        ]
        seeds_given = str(given["seeds"])
        request = Request(given["recipe"], method, seeds=seeds_given, setting=[*shared, *words])
        keys[name] = [run.key() for run in request.runs()]
        if len(keys[name]) != len(seeds):
            raise ValueError(
                f"the line {name!r} has {len(keys[name])} runs for {len(seeds)} seeds; it must be "
                f"one method with one value for each setting, got {lines[name]!r}"
            )
        plan[name] = request.line
    return Comparison(a, b, given["metric"], seeds, keys, plan)


def _refuse_unknown(where: str, given: Iterable[str], known: set[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(
            f"{where} has {', '.join(unknown)}, which it cannot have; it can have "
            f"{', '.join(sorted(known))}"
        )


def refuse_unregistered(
    families: Sequence[Family], rows: pd.DataFrame, tuning: pd.DataFrame
) -> None:
    """Raise ValueError if a family came after a row, its seeds chose something, or a run repeats.

    ``rows`` has the replaced ones too; by those of ``tuning`` settings were chosen.
    """
    for family in families:
        for comparison in family.comparisons:
            refusal = _refusal_of_seeds(family, comparison, rows, tuning)
            if refusal is not None:
                raise ValueError(f"{family.path}: {comparison.name}: {refusal}")
        own = rows[is_of(rows, family.keys)]
        for row in own[own.duplicated(_KEY)].itertuples():
            # a run that is repeated until it pleases would confirm anything
            raise ValueError(
                f"{family.path}: the run of {f'{row.method} {row.options}'.strip()} with seed "
                f"{row.seed} is recorded more than once; a confirmatory run is carried out once: "
                "keep its first row"
            )


def _refusal_of_seeds(
    family: Family, comparison: Comparison, rows: pd.DataFrame, tuning: pd.DataFrame
) -> str | None:
    # the rows on the comparison's tasks with one of its seeds
    used, seen = (
        every[
            pd.MultiIndex.from_frame(every[["recipe", "task"]]).isin(comparison.tasks)
            & every.seed.isin(comparison.seeds)
        ]
        for every in (tuning, rows)
    )
    if len(used):
        return f"seed {used.seed.iloc[0]} was used in tuning; take seeds that chose nothing"
    if len(set(seen.metric) - {comparison.metric}):
        return f"its metric is {comparison.metric}, but its rows report {seen.metric.iloc[0]}"
    for row in seen.itertuples():
        if family.withdrawn:
            return (
                f"seed {row.seed} was recorded at {row.date}, and the family is withdrawn; one "
                "that was run stays a family, and another one takes fresh seeds"
            )
        # the date of a row is that of its end
        began = datetime.fromisoformat(row.date) - timedelta(seconds=row.seconds)
        if family.registered is None or began < family.registered:
            state = f"registered at {family.registered}" if family.registered else "planned"
            return (
                f"seed {row.seed} was recorded at {row.date} after {row.seconds:g} s of training, "
                f"and the family is {state}; register and commit it first, and take fresh seeds"
            )
    return None


def is_of(rows: pd.DataFrame, keys: Iterable[Key]) -> pd.Series:
    """Which rows are of these runs."""
    found = pd.MultiIndex.from_frame(rows[_KEY]).isin([tuple(key) for key in keys])
    return pd.Series(found, index=rows.index, dtype=bool)


@dataclass(frozen=True)
class Outcome:
    """One comparison of a family; until all its pairs count, nothing is compared."""

    comparison: Comparison
    missing: int
    """Pairs that lack a row."""
    unusable: dict[str, int] = field(default_factory=dict)
    """Why pairs that have both rows do not count → how many; no further run can change that."""
    failed: int = 0
    """Pairs in which a run ended without a finite number."""
    contrast: Contrast | None = None
    p_holm: float | None = None
    lines: dict[str, Line] = field(default_factory=dict)
    """The runs of ``a`` and ``b`` by these names; none before the family is complete."""

    @property
    def pairs(self) -> int:
        """The pairs that count."""
        return len(self.comparison.seeds) - self.missing - sum(self.unusable.values())

    @property
    def verdict(self) -> str:
        """*better* or *worse* where Holm's p is below 0.05; that of ``a``, compared with ``b``."""
        every = len(self.comparison.seeds)
        if self.unusable:
            reasons = ", ".join(f"{count} {why}" for why, count in self.unusable.items())
            return (
                f"{reasons}, of {every} pairs: no verdict. A run of a family is not repeated: "
                "register another family with fresh seeds, and run it at one commit without local "
                "changes"
            )
        if self.missing:
            return f"{self.missing} of {every} pairs missing: no verdict"
        if self.failed:
            return f"not finite in {self.failed} of {every} pairs: no verdict"
        if self.contrast is None:
            return "other pairs of the family missing or unusable: no verdict"
        found = self.contrast.test
        if self.p_holm is not None and found.verdict is not None and self.p_holm < 1 - LEVEL:
            # adjusted p values are never below the unadjusted: the interval excludes 0 as well
            return found.verdict
        return found.reading or "not shown"


Judged = tuple[Family, list[Outcome]]


def outcomes(family: Family, rows: pd.DataFrame) -> list[Outcome]:
    """Every comparison of a family; ``rows`` has one row per run."""
    found = [_outcome(comparison, rows) for comparison in family.comparisons]
    if not is_complete(found):
        # no peeking: a family is read when it is complete
        return [replace(outcome, failed=0, contrast=None, lines={}) for outcome in found]
    # a comparison without a p value still counts among those that are corrected for
    ps = [outcome.contrast.test.p if outcome.contrast is not None else None for outcome in found]
    adjusted = holm([1.0 if p is None else p for p in ps])
    return [replace(outcome, p_holm=p) for outcome, p in zip(found, adjusted, strict=True)]


def is_complete(outcomes: Iterable[Outcome]) -> bool:
    return not any(outcome.missing or outcome.unusable for outcome in outcomes)


def _outcome(comparison: Comparison, rows: pd.DataFrame) -> Outcome:
    lines = {line: rows[is_of(rows, keys)] for line, keys in comparison.keys.items()}
    a, b = lines.values()
    pairs = a.merge(b, on="seed", suffixes=("_a", "_b"))
    # a pair on two data sets does not count, below
    data = sorted(set(pairs.data_a[pairs.data_a == pairs.data_b]) - {""})
    if len(data) > 1 or a.seed.duplicated().any() or b.seed.duplicated().any():
        raise ValueError(
            f"{comparison.name}: runs of a family must all be on the same data, these are on "
            f"{'; '.join(data) or 'several'}"
        )
    failed = len(pairs) - len(finite(a).merge(finite(b), on="seed"))
    return Outcome(
        comparison,
        missing=len(comparison.seeds) - len(pairs),
        unusable=dict(Counter(filter(None, map(_refusal_of_pair, pairs.itertuples())))),
        failed=failed,
        contrast=None if failed else contrast(a, b),
        lines={name: Line.of(own) for name, own in lines.items() if len(own)},
    )


def _refusal_of_pair(pair: Any) -> str | None:
    """Why the two rows of a seed are not compared: something else may differ than their lines."""
    commits = (pair.commit_a, pair.commit_b)
    if not all(commits):
        return "without a commit"
    if any(commit.endswith("-dirty") for commit in commits):
        return "with local changes"
    if pair.commit_a != pair.commit_b:
        return "of two commits"
    return "on two data sets" if pair.data_a != pair.data_b else None
