"""From rows to tables: one per (recipe, task, settings) and data, a line per method."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from gfsa_experiments.results.statistics import Contrast, contrast, finite, holm
from gfsa_experiments.runs.row import COLUMNS, Row, read_rows
from gfsa_experiments.tasks import RECIPES

PLAIN = ("plain", "")
DEGREE_1 = "degree1"
# a file with these columns should be a table of runs, even if others are missing or unknown
_MARKS = {"recipe", "task", "method", "seed"}
# the columns of rows that share a table
_TABLE = ["recipe", "task", "settings", "only_data"]


def read_folder(folder: Path, may_be_empty: bool = False) -> pd.DataFrame:
    """Every row of every table of runs in ``folder``; tables with other columns are ignored."""
    paths = sorted(folder.glob("*.csv"))
    rows = [row for path in paths if _is_table_of_runs(path) for row in read_rows(path)]
    if not rows and not may_be_empty:
        found = ", ".join(path.name for path in paths) or "no CSV file"
        raise ValueError(
            f"{folder} has no rows of runs (it has {found}); `gfsa train RECIPE` writes some, and "
            "--dir names the folder that has them"
        )
    return frame_of(rows)


def frame_of(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows with two columns more.

    ``only_data`` is the data of a row if its experiment has rows on several, else None. A row
    without fingerprint belongs to the data of the others if there is one; if there are several,
    its data is unknown and it stays apart, as ``""``.

    ``replaced``: of several rows of one run (same key, seed and data) the latest counts.
    """
    data = defaultdict(set)
    for row in rows:
        data[row.experiment].update({row.data} - {""})
    frame = pd.DataFrame([asdict(row) for row in rows], columns=COLUMNS)
    # numbers, also where no row has one
    frame = frame.astype(dict.fromkeys(("valid", "moved", "peak_memory_mib"), float))
    only = [row.data if len(data[row.experiment]) > 1 else None for row in rows]
    frame["only_data"] = pd.Series(only, dtype=object)
    # stable: rows of one date stay in the order they were written
    frame = frame.sort_values("date", kind="stable")
    run = [*_TABLE, "method", "options", "seed"]
    return frame.assign(replaced=frame.duplicated(run, keep="last"))


def _is_table_of_runs(path: Path) -> bool:
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        header = set(next(csv.reader(file), []))
    if not header:
        raise ValueError(f"{path} is empty and has no header; remove it or restore it")
    # the runs of a damaged table named after a recipe would silently be missing from the page
    mostly_ours = len(header & set(COLUMNS)) > len(COLUMNS) / 2
    return path.stem in RECIPES or header >= _MARKS or mostly_ours


@dataclass(frozen=True, eq=False)
class Line:
    """One method with its options, over its seeds."""

    method: str
    options: str
    rows: pd.DataFrame
    """The rows with a finite result, by seed."""
    failed: tuple[int, ...]
    """The seeds without a finite result."""
    to_plain: Contrast | None = None
    """None for plain itself, without plain and without common seeds."""
    to_degree1: Contrast | None = None
    """None without a single line of degree 1 to compare with, and for that line."""
    times: tuple[float, ...] = ()
    """Seconds per step relative to plain, for each device on which both ran alone."""
    memories: tuple[float, ...] = ()
    """Peak memory relative to plain, for each device on which both ran."""
    adjusted_p: float | None = None
    """Holm's, over every comparison of the folder with plain."""

    @classmethod
    def of(cls, rows: pd.DataFrame, **compared: Any) -> Line:
        rows = rows.sort_values("seed", kind="stable")
        kept = finite(rows)
        failed = tuple(rows.seed.drop(kept.index))
        return cls(rows.method.iloc[0], rows.options.iloc[0], kept, failed, **compared)

    @property
    def name(self) -> str:
        return f"{self.method} {self.options}".strip()

    @property
    def mean(self) -> float | None:
        return _none_if_missing(self.rows.test.mean())

    @property
    def std(self) -> float | None:
        """The sample standard deviation; None for one seed."""
        return _none_if_missing(self.rows.test.std())

    @property
    def coefficients(self) -> tuple[float, ...] | None:
        """Final c0, c1, … averaged over seeds; None without filters or if degrees differ."""
        known = [coefficients_of(r) for r in self.rows.itertuples() if r.coefficients]
        if not known or len({len(coefficients) for coefficients in known}) > 1:
            return None
        return tuple(pd.DataFrame(known).mean())

    @property
    def gpu_seconds(self) -> float | None:
        """Training time of a run, its share of a GPU that runs shared; None for a CPU."""
        # the name of a CPU ends with its threads
        used = self.rows[~self.rows.device.str.endswith("threads") & (self.rows.seconds > 0)]
        return _none_if_missing((used.seconds / used.jobs).mean())


@dataclass(frozen=True, eq=False)
class ResultTable:
    """The results on one task with one choice of settings, on one set of data."""

    recipe: str
    task: str
    settings: str
    data: str | None
    """The data of its rows if there is a table on other data too; empty if it is unknown."""
    metric: str
    higher_is_better: bool
    lines: tuple[Line, ...]
    replaced: pd.DataFrame

    @property
    def rows(self) -> pd.DataFrame:
        return pd.concat([line.rows for line in self.lines])

    @property
    def plain(self) -> Line | None:
        return next((line for line in self.lines if (line.method, line.options) == PLAIN), None)


def make_tables(rows: pd.DataFrame) -> list[ResultTable]:
    """Every table of the folder, with p values adjusted over all comparisons in it."""
    groups = {_without_nan(key): own for key, own in rows.groupby(_TABLE, dropna=False)}
    keys = sorted(groups, key=lambda key: _natural(part or "" for part in key))
    tables = [_make_table(key, groups[key]) for key in keys]
    compared = [(line, line.to_plain) for t in tables for line in t.lines if line.to_plain]
    ps = {id(line): found.test.p for line, found in compared if found.test.p is not None}
    adjusted = dict(zip(ps, holm(list(ps.values())), strict=True))
    return [
        replace(t, lines=tuple(replace(x, adjusted_p=adjusted.get(id(x))) for x in t.lines))
        for t in tables
    ]


def _make_table(key: Any, every: pd.DataFrame) -> ResultTable:
    rows = every[~every.replaced]
    measures = set(zip(rows.metric, rows.higher_is_better, strict=True))
    if len(measures) > 1:
        raise ValueError(
            f"runs of {key[0]} {key[1]} ({key[2] or 'default settings'}) report different metrics, "
            f"{', '.join(sorted(f'{name} ({up})' for name, up in measures))} (higher is better?): "
            "they cannot share a table; remove the rows that are wrong"
        )
    ((metric, up),) = measures
    variants = dict(iter(rows.groupby(["method", "options"])))
    order = sorted(variants, key=lambda key: (key != PLAIN, key[0] != "plain", _natural(key)))
    of_degree_1 = [key for key in order if key[0] == DEGREE_1]
    single = of_degree_1[0] if len(of_degree_1) == 1 else None
    lines = []
    for name in order:
        own = variants[name]
        plain = own[:0] if name == PLAIN else variants.get(PLAIN, own[:0])
        second = None if single is None or name in (PLAIN, single) else variants[single]
        line = Line.of(
            own,
            to_plain=contrast(own, plain),
            to_degree1=None if second is None else contrast(own, second),
            times=_ratios(_seconds_per_step(own), _seconds_per_step(plain)),
            memories=_ratios(_peak_memory(own), _peak_memory(plain)),
        )
        lines.append(line)
    recipe, task, settings, data = key
    replaced = every[every.replaced]
    return ResultTable(recipe, task, settings, data, metric, bool(up), tuple(lines), replaced)


def _seconds_per_step(rows: pd.DataFrame) -> pd.Series:
    """The mean by device, of runs that had the machine to themselves."""
    alone = rows[(rows.jobs == 1) & (rows.seconds_per_step > 0)]
    return alone.groupby("device").seconds_per_step.mean()


def _peak_memory(rows: pd.DataFrame) -> pd.Series:
    """The mean in MiB by device."""
    return rows[rows.peak_memory_mib > 0].groupby("device").peak_memory_mib.mean()


def _ratios(ours: pd.Series, plain: pd.Series) -> tuple[float, ...]:
    """For each device that both have."""
    return tuple((ours / plain).dropna())


def titles(tables: Sequence[ResultTable]) -> list[str]:
    """The task of each table, with what distinguishes it from other tables of that task."""
    settings: dict[tuple[str, str], set[str]] = defaultdict(set)
    for table in tables:
        settings[table.recipe, table.task].add(table.settings)
    named = []
    for table in tables:
        of_task = settings[table.recipe, table.task]
        shared = set.intersection(*(set(text.split()) for text in of_task))
        own = " ".join(word for word in table.settings.split() if word not in shared)
        apart = [own or "otherwise"] if len(of_task) > 1 else []
        if table.data is not None:
            apart.append(f"data {table.data or 'not noted'}")
        named.append(f"{table.task} ({', '.join(apart)})" if apart else table.task)
    return named


def coefficients_of(row: Any) -> tuple[float, ...]:
    """The cell ``0.1 0.9 0.02`` as numbers."""
    try:
        return tuple(map(float, row.coefficients.split()))
    except ValueError:
        raise ValueError(
            f"the row of {row.recipe} {row.task} {row.method} seed {row.seed} has coefficients "
            f"{row.coefficients!r}; expected numbers, c0 c1 c2 …, separated by spaces"
        ) from None


def learns_c0(row: Any) -> bool:
    """Whether the run has filters whose weight of the identity is learned."""
    learned = [word for word in row.options.split() if word.startswith("learn=")]
    named = row.method in ("gfsa", "gfsa-even", DEGREE_1, "polynomial")
    return bool(row.coefficients) and named and all("w0" in word for word in learned)


def _none_if_missing(value: float) -> float | None:
    return None if pd.isna(value) else float(value)


def _without_nan(key: Iterable[Any]) -> tuple[Any, ...]:
    """A key with None instead of NaN, which does not equal itself."""
    return tuple(None if pd.isna(part) else part for part in key)


def _natural(texts: Iterable[str]) -> list[list[tuple[bool, int, str]]]:
    """A sort key that puts K=10 after K=2."""
    return [
        [
            (part.isdigit(), int(part) if part.isdigit() else 0, part)
            for part in re.split(r"(\d+)", text)
        ]
        for text in texts
    ]
