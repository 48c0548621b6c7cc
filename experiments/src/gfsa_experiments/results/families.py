"""Families of confirmatory comparisons, written down in ``families/NAME.toml`` before their runs.

    title = "ZINC: the second pass"
    registered = 2026-12-01T08:00:00Z    # left out while the family is planned
    recipe = "graph"
    metric = "mae"
    seeds = "100-115"
    settings = "data=zinc model=graphormer-slim epochs=100"

    [lines]                              # a method, its options, and settings of its own
    gfsa = "gfsa K=2 filter_lr=1e-2"
    degree1 = "degree1 filter_lr=1e-2"

    [[comparison]]                       # two-sided, a − b; Holm's correction is over all of them
    a = "gfsa"
    b = "degree1"

``recipe``, ``metric``, ``seeds`` and ``settings`` are of every comparison, unless it has its own.
``withdrawn = "reason"`` is set where a family will not be run; it stays as the record of what was
planned, and may have no row.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from gfsa_experiments.runs.run import Key, Run

# Python 3.10 has no reader of TOML
tomllib: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

FOLDER = "families"
FIRST_SEED = 100
"""Lower seeds are for tuning and exploration."""

METRICS = {
    "text": {"accuracy", "rmse"},
    "glue": {"accuracy", "f1", "matthews", "spearman"},
    "causal_lm": {"perplexity"},
    "code": {"accuracy", "f1"},
    "image": {"accuracy"},
    "graph": {"mae", "rmse", "ap", "rocauc", "accuracy"},
    "speech": {"wer"},
    "lra": {"accuracy"},
    "pretrain": {"loss"},
    "stdlib": {"bits_per_byte"},
    "digits": {"accuracy"},
}
"""What rows of each recipe report; a recipe of the user's own may report anything."""

_KEY = ["recipe", "task", "method", "options", "settings", "seed"]
_SHARED = ("recipe", "metric", "seeds", "settings")
_TOP = {"title", "registered", "withdrawn", *_SHARED, "lines", "comparison"}


@dataclass(frozen=True)
class Comparison:
    """``a − b`` on one metric over fresh seeds; each line has one run per seed."""

    a: str
    b: str
    metric: str
    runs: dict[str, tuple[Run, ...]]
    """The runs of both lines, in the order of the seeds."""
    arguments: dict[str, str]
    """Those of ``gfsa train`` for the runs of each line."""

    @property
    def name(self) -> str:
        return f"{self.a} − {self.b}"

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.config.seed for run in self.runs[self.a])

    def keys(self, line: str) -> list[Key]:
        return [run.key() for run in self.runs[line]]

    @property
    def tasks(self) -> set[tuple[str, str]]:
        """The recipe and task of both lines; a deeper model may be another task."""
        return {runs[0].key()[:2] for runs in self.runs.values()}


@dataclass(frozen=True)
class Family:
    name: str
    title: str
    registered: datetime | None
    """None while the family is planned."""
    comparisons: tuple[Comparison, ...]
    path: Path
    content: dict[str, Any]
    withdrawn: str = ""
    """Why it will not be run; empty for all others."""

    @property
    def plan(self) -> list[str]:
        """The arguments of ``gfsa train`` for all runs."""
        every = [line for comparison in self.comparisons for line in comparison.arguments.values()]
        return list(dict.fromkeys(every))

    @property
    def keys(self) -> set[Key]:
        runs = [run for found in self.comparisons for line in found.runs.values() for run in line]
        return {run.key() for run in runs}


def read_families(folder: Path) -> list[Family]:
    """The families of a folder of rows, each checked by itself."""
    return [read_family(path) for path in sorted((folder / FOLDER).glob("*.toml"))]


def read_family(path: Path) -> Family:
    """One family; a ValueError names the file and what is wrong in it."""
    try:
        return _family(path, tomllib.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _family(path: Path, content: dict[str, Any]) -> Family:
    _refuse_unknown("the file", content, _TOP)
    if not content.get("comparison"):
        raise ValueError("expected at least one [[comparison]] with a and b, got none")
    registered = content.get("registered")
    if registered is not None and not (isinstance(registered, datetime) and registered.tzinfo):
        raise ValueError(
            "registered is a time with its zone such as 2026-12-01T08:00:00Z, "
            f"got {registered!r}; leave it out while the family is planned"
        )
    withdrawn = content.get("withdrawn")
    if withdrawn is not None and not (isinstance(withdrawn, str) and withdrawn.strip()):
        raise ValueError(f"withdrawn is the reason in words, got {withdrawn!r}")
    comparisons = tuple(_comparison(content, own) for own in content["comparison"])
    pairs = [(found.keys(found.a), found.keys(found.b)) for found in comparisons]
    if any(pair in pairs[:at] or pair[::-1] in pairs[:at] for at, pair in enumerate(pairs)):
        raise ValueError("a comparison is listed twice; it would count twice in Holm's correction")
    title = content.get("title", path.stem)
    return Family(path.stem, title, registered, comparisons, path, content, withdrawn or "")


def _comparison(content: dict[str, Any], own: dict[str, Any]) -> Comparison:
    from gfsa_experiments.runs.sweep import Request, numbers_of

    _refuse_unknown("a [[comparison]]", own, {"a", "b", *_SHARED})
    given = {"settings": "", **{name: content[name] for name in _SHARED if name in content}, **own}
    lacking = [name for name in (*_SHARED, "a", "b") if name not in given]
    if lacking:
        raise ValueError(f"a [[comparison]] lacks {', '.join(lacking)}")
    metrics = METRICS.get(given["recipe"], {given["metric"]})
    if given["metric"] not in metrics:
        raise ValueError(
            f"the metric of {given['recipe']} is {' or '.join(sorted(metrics))}, "
            f"got {given['metric']!r}"
        )
    seeds = numbers_of("seeds", str(given["seeds"]))
    listed = [seed for part in str(given["seeds"]).split(",") for seed in numbers_of("seeds", part)]
    _refuse_repeated("seeds", map(str, listed))
    if min(seeds) < FIRST_SEED or len(seeds) < 2:
        raise ValueError(
            f"seeds must be two or more fresh ones from {FIRST_SEED} on, got {given['seeds']}: "
            "lower seeds are for tuning and exploration"
        )
    a, b = given["a"], given["b"]
    if a == b:
        raise ValueError(f"a and b are both {a!r}; a comparison needs two lines")
    lines, runs, arguments = content.get("lines", {}), {}, {}
    for name in (a, b):
        if name not in lines:
            raise ValueError(f"there is no line {name!r} in [lines]; there are {', '.join(lines)}")
        method, *words = lines[name].split()
        # a line's own settings come last and count
        settings = _settings("settings", given["settings"].split())
        settings |= _settings(f"the line {name!r}", words)
        request = Request(given["recipe"], (method,), (), seeds, tuple(settings.items()))
        runs[name] = tuple(request.runs())
        flags = "".join(f" --set {shlex.quote(f'{k}={v}')}" for k, v in settings.items())
        arguments[name] = f"{given['recipe']} --method {method} --seeds {given['seeds']}{flags}"
    return Comparison(a, b, given["metric"], runs, arguments)


def _settings(where: str, words: Sequence[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    _refuse_repeated(where, [key for key, _, _ in pairs])
    return {key: value for key, _, value in pairs}


def _refuse_repeated(where: str, given: Iterable[str]) -> None:
    repeated = [value for value, count in Counter(given).items() if count > 1]
    if repeated:
        raise ValueError(f"{where} has {', '.join(repeated)} more than once; leave one")


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
    """Raise ValueError if a family came after a row, or its seeds chose something.

    Args:
        rows: every row of the folder, replaced ones included.
        tuning: every row that settings were chosen by.
    """
    for family in families:
        for comparison in family.comparisons:
            refusal = _refusal_of_seeds(family, comparison, rows, tuning)
            if refusal is not None:
                raise ValueError(f"{family.path}: {comparison.name}: {refusal}")
        refusal = _refusal_of_repeats(family, rows) or refusal_of_history(family, rows)
        if refusal is not None:
            raise ValueError(f"{family.path}: {refusal}")


def _refusal_of_seeds(
    family: Family, comparison: Comparison, rows: pd.DataFrame, tuning: pd.DataFrame
) -> str | None:
    used = _of_task(tuning, comparison)
    if len(used):
        return f"seed {used.seed.iloc[0]} was used in tuning; take seeds that chose nothing"
    seen = _of_task(rows, comparison)
    if len(set(seen.metric) - {comparison.metric}):
        return f"its metric is {comparison.metric}, but its rows report {seen.metric.iloc[0]}"
    if family.withdrawn and len(seen):
        return (
            f"seed {seen.seed.iloc[0]} was recorded at {seen.date.iloc[0]}, and the family is "
            "withdrawn; one that was run stays a family, and another one takes fresh seeds"
        )
    for row, began in zip(seen.itertuples(), _began(seen), strict=True):
        if family.registered is None or began < family.registered:
            return (
                f"seed {row.seed} was recorded at {row.date} after {row.seconds:g} s of training, "
                f"and the family is {_state(family)}; register and commit it first, and take "
                "fresh seeds"
            )
    return None


def _began(rows: pd.DataFrame) -> list[datetime]:
    """When the run of each row had begun at the latest: its date is that of its end."""
    return [
        datetime.fromisoformat(date) - timedelta(seconds=seconds)
        for date, seconds in zip(rows.date, rows.seconds, strict=True)
    ]


def _state(family: Family) -> str:
    return "planned" if family.registered is None else f"registered at {family.registered}"


def _of_task(rows: pd.DataFrame, comparison: Comparison) -> pd.DataFrame:
    """The rows on a comparison's tasks with one of its seeds."""
    tasks = comparison.tasks
    of_tasks = [key in tasks for key in zip(rows.recipe, rows.task, strict=True)]
    return rows[pd.Series(of_tasks, rows.index, dtype=bool) & rows.seed.isin(comparison.seeds)]


def _refusal_of_repeats(family: Family, rows: pd.DataFrame) -> str | None:
    """A run that is repeated until it pleases would confirm anything."""
    own = rows[is_of(rows, family.keys)]
    repeated = own[own.duplicated(_KEY)]
    if repeated.empty:
        return None
    row = repeated.iloc[0]
    line = f"{row.method} {row.options}".strip()
    return (
        f"the run of {line} with seed {row.seed} is recorded more than once; a confirmatory run is "
        "carried out once: keep its first row"
    )


def refusal_of_history(family: Family, rows: pd.DataFrame) -> str | None:
    """Why git does not show that the family, as it is, was committed before its first run.

    None if git shows it, if no run is recorded, and where the history is not there.
    """
    own = rows[is_of(rows, family.keys)]
    if own.empty or not has_history(family.path):
        return None
    first = min(_began(own))
    commits = _git(family.path, "log", "--format=%H %cI", "--", family.path.name)
    dated = [line.split() for line in (commits or "").splitlines()]
    before = [commit for commit, date in dated if datetime.fromisoformat(date) <= first]
    if not before:
        return f"it was not committed before its first run, begun at {first}"
    then = _git(family.path, "show", f"{before[0]}:./{family.path.name}")
    # comments may change, what is compared may not
    if then is None or tomllib.loads(then) != family.content:
        return (
            f"it was changed after its first run, begun at {first}; "
            f"restore it as at {before[0][:7]}"
        )
    return None


def has_history(path: Path) -> bool:
    """Whether ``path`` is in a git repository that has all commits, unlike a shallow clone."""
    return _git(path, "rev-parse", "--is-shallow-repository") == "false\n"


def _git(path: Path, *arguments: str) -> str | None:
    """What git prints, None if it fails: without git, or outside of a repository."""
    try:
        ran = subprocess.run(
            ["git", *arguments], cwd=path.parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return ran.stdout if ran.returncode == 0 else None


def is_of(rows: pd.DataFrame, keys: set[Key]) -> pd.Series:
    """Which rows are of these runs."""
    found = rows[_KEY].itertuples(index=False, name=None)
    wanted = {tuple(key) for key in keys}
    return pd.Series([key in wanted for key in found], index=rows.index, dtype=bool)
