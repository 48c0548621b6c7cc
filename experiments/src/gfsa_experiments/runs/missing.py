"""The runs that have no row yet, for ``gfsa train --missing``.

A row is of a run if it has the run's key and is on the run's data. The key alone does not say so:
of a path outside of the working folder it has the last part, and ``--data-dir`` is not in it.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from gfsa_experiments.runs.row import read_rows_if_any
from gfsa_experiments.runs.run import Key, Run, data_of, recorded_data
from gfsa_experiments.runs.same_data import Source, source_of

DataOfRows = Mapping[Key, set[str]]
"""The fingerprints of the data that the rows of a run are on."""


def data_of_rows(runs: Sequence[Run], results: Path) -> DataOfRows:
    """What the tables of these runs have; every row of them is read."""
    tables = {results / f"{run.key().recipe}.csv" for run in runs}
    found: dict[Key, set[str]] = defaultdict(set)
    for table in tables:
        for row in read_rows_if_any(table):
            key = Key(row.recipe, row.task, row.method, row.options, row.settings, row.seed)
            found[key].add(row.data)
    return found


def lacking(runs: Sequence[Run], known: DataOfRows) -> list[Run]:
    """The runs without a row on their data.

    The data is read where a run has rows and its folder does not record on which data it was begun,
    once for all runs on it. If that fails, the rows count, and a warning says so.

    Args:
        known: the rows, as :func:`data_of_rows` finds them.
    """
    read_already: dict[Source, str | None] = {}

    def find(run: Run) -> str | None:
        recorded = recorded_data(run)
        if recorded is not None:
            return recorded
        source = source_of(run)
        if source not in read_already:
            read_already[source] = _read_or_warn(run)
        return read_already[source]

    def has_row(run: Run) -> bool:
        rows = known.get(run.key(), set())
        # rows of earlier versions, which have no fingerprint, may be on any data
        if not rows or "" in rows:
            return bool(rows)
        data = find(run)
        return data is None or data in rows

    return [run for run in runs if not has_row(run)]


def _read_or_warn(run: Run) -> str | None:
    try:
        return data_of(run)
    except (ValueError, OSError) as error:
        warnings.warn(
            f"--missing leaves out runs such as {run}, which have a row; whether it is on the same "
            f"data is not known, because the data cannot be read: {error}",
            stacklevel=2,
        )
        return None
