"""Whether runs and rows are on the same data, decided by the data's fingerprint.

Rows of earlier versions have no fingerprint: they may be on any data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gfsa_experiments.runs.row import Experiment, Row, read_rows_if_any

if TYPE_CHECKING:
    from gfsa_experiments.runs.run import Run


def may_be_same(first: str, second: str) -> bool:
    """Whether two fingerprints may be of the same data; an empty one goes with any."""
    return not first or not second or first == second


def has_row(table: Path, row: Row) -> bool:
    """Whether a table has a row of the same run, which may be on the same data."""
    return any(
        other.key == row.key and may_be_same(row.data, other.data)
        for other in read_rows_if_any(table)
    )


def data_of_experiments(rows: Iterable[Row]) -> Callable[[Row], str | None]:
    """A function that gives the data of a row if its experiment has rows on several, else None.

    A row without fingerprint belongs to the data of the others if there is one. If there are
    several, its data is unknown and it stays apart, as ``""``.
    """
    found: dict[Experiment, set[str]] = defaultdict(set)
    for row in rows:
        if row.data:
            found[row.experiment].add(row.data)
    several = {experiment for experiment, data in found.items() if len(data) > 1}
    return lambda row: row.data if row.experiment in several else None


def difference(old: str, new: str) -> str:
    """How two fingerprints differ, in words."""
    (old_sizes, _, old_hash), (new_sizes, _, new_hash) = old.partition(" "), new.partition(" ")
    if old_sizes != new_sizes:
        return f"{old_sizes} examples in train+valid+test then, {new_sizes} now"
    return f"as many examples, {new_sizes}, but different ones: {old_hash} then, {new_hash} now"


def lacking(runs: Sequence[Run], results: Path) -> list[Run]:
    """The runs without a row on their data, for ``gfsa train --missing``.

    A row is of a run if it has the run's key and is on the run's data, which is read once for all
    runs on it. If that fails, the rows count, and a warning says so.
    """
    from gfsa_experiments.runs.run import data_of

    known: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for name in {run.key().recipe for run in runs}:
        for row in read_rows_if_any(results / f"{name}.csv"):
            known[row.key].add(row.data)
    read: dict[tuple[str, str, Path], str | None] = {}

    def data(run: Run) -> str | None:
        # as text: the settings of a recipe of the user's own may be of any kind
        source = run.recipe, repr(dataclasses.replace(run.config, seed=0)), run.data_dir
        if source not in read:
            try:
                read[source] = data_of(run)
            except (ValueError, OSError) as error:
                warnings.warn(
                    f"--missing leaves out runs such as {run}, which have a row; whether it is on "
                    f"the same data is not known, because the data cannot be read: {error}",
                    stacklevel=2,
                )
                read[source] = None
        return read[source]

    def has_own_row(run: Run) -> bool:
        rows = known.get(tuple(run.key()), set())
        return bool(rows) and ("" in rows or data(run) in (None, *rows))

    return [run for run in runs if not has_own_row(run)]


def warn_of_rows_on_other_data(run: Run, data: str) -> None:
    """Warn, before hours of training, if rows of the experiment are on other data than the run."""
    if run.results is None:
        return
    key = run.key()
    table = run.results / f"{key.recipe}.csv"
    seeds: dict[str, set[int]] = defaultdict(set)
    # an unreadable table is no reason to stop here: appending the row reports it
    with contextlib.suppress(ValueError, OSError):
        for row in read_rows_if_any(table):
            if row.experiment == key.experiment and not may_be_same(row.data, data):
                seeds[f"{row.name} on {row.data}, seed "].add(row.seed)
    if seeds:
        others = "; ".join(name + ", ".join(map(str, sorted(of))) for name, of in seeds.items())
        warnings.warn(
            f"{key.recipe} {key.task} runs on data {data}, and {table} has rows of the same "
            f"experiment on other data ({others}): they are not compared with each other",
            stacklevel=2,
        )
