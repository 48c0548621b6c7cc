"""From rows of runs to tables: one a (recipe, task, settings), one line a (method, options).

Where such runs are on different data, there is a table for each.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from gfsa_experiments.results.load_rows import Experiment, Runs, experiment, told_apart
from gfsa_experiments.results.statistics import PairedDifference, holm, paired_difference
from gfsa_experiments.runs.row import Row

PLAIN = ("plain", "")


@dataclass(frozen=True)
class Line:
    """One method with its options, over its seeds."""

    method: str
    options: str
    rows: tuple[Row, ...]
    """Those that ended in a finite number."""
    failed: tuple[int, ...]
    """Seeds that did not."""
    difference: PairedDifference | None
    """To plain; None for plain itself, without plain and without common seeds."""
    times: tuple[float, ...]
    """Seconds per step relative to plain, one a device on which both ran alone."""
    memories: tuple[float, ...]
    """Peak memory relative to plain, one a device on which both ran."""
    adjusted_p: float | None = None
    """Holm's, over every comparison of the folder."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.options}".strip()

    @property
    def values(self) -> dict[int, float]:
        return {row.seed: row.test for row in self.rows}

    @property
    def mean(self) -> float | None:
        return fmean(self.values.values()) if self.rows else None

    @property
    def std(self) -> float | None:
        """The sample's standard deviation; None for one seed."""
        return stdev(self.values.values()) if len(self.rows) > 1 else None

    @property
    def valid(self) -> float | None:
        """Mean on what choices are made on, where every run has it."""
        known = [row.valid for row in self.rows if row.valid is not None]
        return fmean(known) if known and len(known) == len(self.rows) else None

    @property
    def added(self) -> tuple[int, ...]:
        """Numbers that the method added; one entry unless runs disagree."""
        return tuple(sorted({row.added for row in self.rows}))

    @property
    def seconds_per_step(self) -> dict[str, list[float]]:
        """By device, of runs that had the machine to themselves."""
        return _times(self.rows)

    @property
    def peak_memory_mib(self) -> dict[str, list[float]]:
        """By device."""
        return _memories(self.rows)

    @property
    def moved(self) -> float | None:
        known = [row.moved for row in self.rows if row.moved is not None]
        return fmean(known) if known else None

    @property
    def coefficients(self) -> tuple[float, ...] | None:
        """Final c0, c1, … averaged over seeds; None without filters or if degrees differ."""
        known = [coefficients_of(row) for row in self.rows if row.coefficients]
        if not known or len({len(one) for one in known}) > 1:
            return None
        return tuple(fmean(column) for column in zip(*known, strict=True))


@dataclass(frozen=True)
class ResultTable:
    """What was measured on one task with one choice of settings."""

    recipe: str
    task: str
    settings: str
    metric: str
    higher_is_better: bool
    lines: tuple[Line, ...]
    replaced: tuple[Row, ...]
    data: str | None = None
    """What its rows are on, where others are on other data; empty if they do not say."""

    @property
    def rows(self) -> list[Row]:
        return [row for line in self.lines for row in line.rows]

    @property
    def plain(self) -> Line | None:
        return next((line for line in self.lines if (line.method, line.options) == PLAIN), None)


def make_tables(runs: Runs) -> list[ResultTable]:
    """Every table of the folder, with p values adjusted over all comparisons in it."""
    data_of = told_apart(runs.rows)
    groups: dict[Experiment, dict[str | None, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in runs.rows:
        groups[experiment(row)][data_of(row)].append(row)
    tables = []
    for key in sorted(groups, key=_natural):
        by_data = groups[key]
        for data in sorted(by_data, key=lambda data: _natural([data or ""])):
            replaced = [r for r in runs.replaced if (experiment(r), data_of(r)) == (key, data)]
            tables.append(replace(_make_table(by_data[data], replaced), data=data))
    return _adjusted(tables)


def coefficients_of(row: Row) -> tuple[float, ...]:
    """``0.1 0.9 0.02``, also as ``c0=0.1 c1=0.9 c2=0.02``, as numbers."""
    try:
        return tuple(float(part.rpartition("=")[2]) for part in row.coefficients.split())
    except ValueError:
        raise ValueError(
            f"the row of {row.recipe} {row.task} {row.method} seed {row.seed} has coefficients "
            f"{row.coefficients!r}; expected numbers, c0 c1 c2 …, with spaces between them"
        ) from None


def _make_table(rows: Sequence[Row], replaced: Sequence[Row]) -> ResultTable:
    first = rows[0]
    measures = {(row.metric, row.higher_is_better) for row in rows}
    if len(measures) > 1:
        raise ValueError(
            f"runs of {first.recipe} {first.task} ({first.settings or 'default settings'}) report "
            f"different metrics, {', '.join(sorted(f'{name} ({up})' for name, up in measures))} "
            "(higher is better?): they cannot stand in one table; remove the rows that are wrong"
        )
    variants: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.seed):
        variants[row.method, row.options].append(row)
    order = sorted(variants, key=lambda key: (key != PLAIN, key[0] != "plain", _natural(key)))
    plain = variants.get(PLAIN, [])
    lines = tuple(_make_line(variants[key], [] if key == PLAIN else plain) for key in order)
    return ResultTable(*experiment(first), *measures.pop(), lines, tuple(replaced))


def _make_line(rows: Sequence[Row], plain: Sequence[Row]) -> Line:
    first = rows[0]
    finished = [row for row in rows if math.isfinite(row.test)]
    return Line(
        method=first.method,
        options=first.options,
        rows=tuple(finished),
        failed=tuple(row.seed for row in rows if not math.isfinite(row.test)),
        difference=paired_difference(
            {row.seed: row.test for row in plain if math.isfinite(row.test)},
            {row.seed: row.test for row in finished},
            first.higher_is_better,
        ),
        times=_ratios(_times(rows), _times(plain)),
        memories=_ratios(_memories(rows), _memories(plain)),
    )


def _adjusted(tables: Sequence[ResultTable]) -> list[ResultTable]:
    compared = [
        line.difference.p
        for table in tables
        for line in table.lines
        if line.difference is not None and line.difference.p is not None
    ]
    adjusted = iter(holm(compared))
    return [
        replace(
            table,
            lines=tuple(
                replace(line, adjusted_p=next(adjusted))
                if line.difference is not None and line.difference.p is not None
                else line
                for line in table.lines
            ),
        )
        for table in tables
    ]


def _times(rows: Iterable[Row]) -> dict[str, list[float]]:
    """Seconds per step by device, of runs that had the machine to themselves."""
    found = defaultdict(list)
    for row in rows:
        if row.jobs == 1 and row.seconds_per_step > 0:
            found[row.device].append(row.seconds_per_step)
    return found


def _memories(rows: Iterable[Row]) -> dict[str, list[float]]:
    found = defaultdict(list)
    for row in rows:
        if row.peak_memory_mib:
            found[row.device].append(row.peak_memory_mib)
    return found


def _ratios(ours: dict[str, list[float]], plain: dict[str, list[float]]) -> tuple[float, ...]:
    return tuple(fmean(ours[on]) / fmean(plain[on]) for on in sorted(ours.keys() & plain.keys()))


def _natural(texts: Iterable[str]) -> list[list[tuple[bool, int, str]]]:
    """A sort key that puts K=10 behind K=2."""
    return [
        [
            (part.isdigit(), int(part) if part.isdigit() else 0, part)
            for part in re.split(r"(\d+)", text)
        ]
        for text in texts
    ]
