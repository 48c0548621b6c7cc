"""Tables of results: one per (recipe, task, settings) and data, one line per (method, options)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from gfsa_experiments.results.load_rows import TABLE, Runs
from gfsa_experiments.results.statistics import PairedDifference, holm, paired_difference

PLAIN = ("plain", "")


@dataclass(frozen=True, eq=False)
class Line:
    """One method with its options, over its seeds."""

    method: str
    options: str
    rows: pd.DataFrame
    """The rows with a finite result, by seed."""
    failed: tuple[int, ...]
    """The seeds without a finite result."""
    difference: PairedDifference | None
    """To plain; None for plain itself, without plain and without common seeds."""
    times: tuple[float, ...]
    """Seconds per step relative to plain, for each device on which both ran alone."""
    memories: tuple[float, ...]
    """Peak memory relative to plain, for each device on which both ran."""
    adjusted_p: float | None = None
    """Holm's, over every comparison of the folder."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.options}".strip()

    @property
    def values(self) -> dict[int, float]:
        return values_by_seed(self.rows)

    @property
    def mean(self) -> float | None:
        return _none_if_missing(self.rows.test.mean())

    @property
    def std(self) -> float | None:
        """The sample standard deviation; None for one seed."""
        return _none_if_missing(self.rows.test.std())

    @property
    def valid(self) -> float | None:
        """The mean on the validation split, if every run has it."""
        return _none_if_missing(self.rows.valid.mean(skipna=False))

    @property
    def added(self) -> tuple[int, ...]:
        """How many numbers the method added; one entry unless runs disagree."""
        return tuple(sorted(set(self.rows.added)))

    @property
    def moved(self) -> float | None:
        return _none_if_missing(self.rows.moved.mean())

    @property
    def coefficients(self) -> tuple[float, ...] | None:
        """Final c0, c1, … averaged over seeds; None without filters or if degrees differ."""
        known = [_coefficients_of(r) for r in self.rows.itertuples() if r.coefficients]
        if not known or len({len(coefficients) for coefficients in known}) > 1:
            return None
        return tuple(pd.DataFrame(known).mean())


@dataclass(frozen=True, eq=False)
class ResultTable:
    """The results on one task with one choice of settings, on one set of data."""

    recipe: str
    task: str
    settings: str
    metric: str
    higher_is_better: bool
    lines: tuple[Line, ...]
    replaced: pd.DataFrame
    data: str | None = None
    """The data of its rows if there is a table on other data too; empty if it is unknown."""

    @property
    def rows(self) -> pd.DataFrame:
        return pd.concat([line.rows for line in self.lines])

    @property
    def plain(self) -> Line | None:
        return next((line for line in self.lines if (line.method, line.options) == PLAIN), None)


def make_tables(runs: Runs) -> list[ResultTable]:
    """Every table of the folder, with p values adjusted over all comparisons in it."""
    groups = {_without_nan(key): rows for key, rows in runs.rows.groupby(TABLE, dropna=False)}
    replaced = {_without_nan(k): rows for k, rows in runs.replaced.groupby(TABLE, dropna=False)}
    keys = sorted(groups, key=lambda key: _natural(part or "" for part in key))
    return _adjusted([_make_table(groups[k], replaced.get(k, runs.replaced[:0])) for k in keys])


def _make_table(rows: pd.DataFrame, replaced: pd.DataFrame) -> ResultTable:
    recipe, task, settings, data = _without_nan(rows[TABLE].iloc[0])
    measures = set(zip(rows.metric, rows.higher_is_better, strict=True))
    if len(measures) > 1:
        raise ValueError(
            f"runs of {recipe} {task} ({settings or 'default settings'}) report different metrics, "
            f"{', '.join(sorted(f'{name} ({up})' for name, up in measures))} (higher is better?): "
            "they cannot share a table; remove the rows that are wrong"
        )
    ((metric, higher_is_better),) = measures
    by_seed = rows.sort_values("seed", kind="stable")
    variants = dict(iter(by_seed.groupby(["method", "options"])))
    order = sorted(variants, key=lambda key: (key != PLAIN, key[0] != "plain", _natural(key)))
    plain = variants.get(PLAIN, rows[:0])
    lines = tuple(
        _make_line(key, variants[key], rows[:0] if key == PLAIN else plain) for key in order
    )
    return ResultTable(
        recipe, task, settings, metric, bool(higher_is_better), lines, replaced, data
    )


def _make_line(key: tuple[str, str], rows: pd.DataFrame, plain: pd.DataFrame) -> Line:
    finite = rows[rows.test.abs() < float("inf")]
    return Line(
        *key,
        rows=finite,
        failed=tuple(rows.seed.drop(finite.index)),
        difference=paired_difference(
            values_by_seed(plain[plain.test.abs() < float("inf")]),
            values_by_seed(finite),
            bool(rows.higher_is_better.iloc[0]),
        ),
        times=_ratios(seconds_per_step(rows), seconds_per_step(plain)),
        memories=_ratios(peak_memory(rows), peak_memory(plain)),
    )


def values_by_seed(rows: pd.DataFrame) -> dict[int, float]:
    return dict(zip(rows.seed.tolist(), rows.test.tolist(), strict=True))


def seconds_per_step(rows: pd.DataFrame) -> pd.Series:
    """The mean by device, of runs that had the machine to themselves."""
    alone = rows[(rows.jobs == 1) & (rows.seconds_per_step > 0)]
    return alone.groupby("device").seconds_per_step.mean()


def peak_memory(rows: pd.DataFrame) -> pd.Series:
    """The mean in MiB by device."""
    return rows[rows.peak_memory_mib > 0].groupby("device").peak_memory_mib.mean()


def _ratios(ours: pd.Series, plain: pd.Series) -> tuple[float, ...]:
    """For each device that both have."""
    return tuple((ours / plain).dropna())


def _adjusted(tables: Sequence[ResultTable]) -> list[ResultTable]:
    lines = [line for table in tables for line in table.lines]
    ps = {id(line): line.difference.p for line in lines if line.difference is not None}
    known = {key: p for key, p in ps.items() if p is not None}
    adjusted = dict(zip(known, holm(list(known.values())), strict=True))
    return [
        replace(
            table,
            lines=tuple(replace(line, adjusted_p=adjusted.get(id(line))) for line in table.lines),
        )
        for table in tables
    ]


def _coefficients_of(row: Any) -> tuple[float, ...]:
    """``0.1 0.9 0.02``, also as ``c0=0.1 c1=0.9 c2=0.02``, as numbers."""
    try:
        return tuple(float(part.rpartition("=")[2]) for part in row.coefficients.split())
    except ValueError:
        raise ValueError(
            f"the row of {row.recipe} {row.task} {row.method} seed {row.seed} has coefficients "
            f"{row.coefficients!r}; expected numbers, c0 c1 c2 …, separated by spaces"
        ) from None


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
