"""Whether runs and rows are on the same data, decided by the data's fingerprint.

Rows and run folders of earlier versions have no fingerprint: they may be on any data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfsa_experiments.data.own import is_in_working_folder, is_written_after
from gfsa_experiments.runs.row import Experiment, Row, read_rows_if_any
from gfsa_experiments.runs.run_folder import read_record, write_json

if TYPE_CHECKING:
    from gfsa_experiments.runs.run import Run


def may_be_same(first: str, second: str) -> bool:
    """Whether two fingerprints may be of the same data; an empty one goes with any."""
    return not first or not second or first == second


def has_row(table: Path, row: Row) -> bool:
    """Whether a table has a row of the same run, which may be on the same data."""
    run = (row.experiment, row.method, row.options, row.seed)
    return any(
        (other.experiment, other.method, other.options, other.seed) == run
        and may_be_same(row.data, other.data)
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


@dataclass(frozen=True)
class RunData:
    """The data of a run, as its folder records it in ``data.json``."""

    data: str
    """The fingerprint, as in the row."""
    data_dir: str
    """The whole path; it stays in the run's folder, because rows are published."""


def write_data(folder: Path, data: str, data_dir: Path) -> None:
    record = RunData(data, str(data_dir.resolve()))
    write_json(folder / "data.json", dataclasses.asdict(record))


def check_resumed_data(folder: Path, data: str) -> None:
    """Raise ValueError if the interrupted run in ``folder`` was begun on other data."""
    begun = read_record(folder / "data.json", RunData)
    if begun is not None and begun.data != data:
        raise ValueError(
            f"{folder} was begun on other data, from {begun.data_dir} "
            f"({difference(begun.data, data)}); give it that data, or use another --out"
        )


def data_begun_on(folder: Path, data_dir: Path, config: Any) -> str | None:
    """The fingerprint that a run's folder records, if the data is at the path that it had then.

    None if it may be at another path (of own data that is named from the working folder, the run's
    folder does not record the whole path), or if own data was written since.
    """
    record = folder / "data.json"
    begun = read_record(record, RunData)
    if begun is None or begun.data_dir != str(data_dir.resolve()):
        return None
    # a recipe of the user's own may have None there, or a path; tokens depend on the tokenizer, too
    own = [str(getattr(config, name, None) or "") for name in ("data", "tokenizer")]
    if any(is_in_working_folder(name, data_dir) for name in own):
        return None
    since = record.stat().st_mtime
    return None if any(is_written_after(name, data_dir, since) for name in own) else begun.data


def check_finished_data(
    folder: Path, data_dir: Path, config: Any, find_data: Callable[[], str]
) -> None:
    """Raise ValueError if the finished run in ``folder`` is on other data than there is now.

    Data at the same path is taken to be the same without reading it, unless it was written since.

    Args:
        config: the settings of the run.
        find_data: reads the data and gives its fingerprint.
    """
    begun, place = read_record(folder / "data.json", RunData), str(data_dir.resolve())
    if begun is None or data_begun_on(folder, data_dir, config) is not None:
        return
    try:
        data = find_data()
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{folder} holds a finished run on the data in {begun.data_dir}, which cannot be "
            f"compared with that in {place}; give --data-dir {begun.data_dir} or use another "
            f"--out: {error}"
        ) from error
    if data != begun.data:
        raise ValueError(
            f"{folder} holds a finished run on other data, from {begun.data_dir} "
            f"({difference(begun.data, data)}); use another --out"
        )


def difference(old: str, new: str) -> str:
    """How two fingerprints differ, in words."""
    (old_sizes, _, old_hash), (new_sizes, _, new_hash) = old.partition(" "), new.partition(" ")
    if old_sizes != new_sizes:
        return f"{old_sizes} examples in train+valid+test then, {new_sizes} now"
    return f"as many examples, {new_sizes}, but different ones: {old_hash} then, {new_hash} now"


Source = tuple[str, str, Path]
"""Where the data of a run comes from: runs with equal sources are on the same data."""


def source_of(run: Run) -> Source:
    """The settings without the seed, which have the whole path of own data, and ``--data-dir``."""
    # as text: the settings of a recipe of the user's own may be of any kind
    return run.recipe, repr(dataclasses.replace(run.config, seed=0)), run.data_dir


def compare_once(runs: Sequence[Run], results: Path) -> list[Run]:
    """The runs, of which one per experiment and data compares it with the rows in ``results``."""
    first: dict[Source, Run] = {}
    for run in runs:
        if not run.is_resumed_and_finished:
            first.setdefault(source_of(run), run)
    comparing = {run.folder for run in first.values()}
    return [
        dataclasses.replace(r, results=results if r.folder in comparing else None) for r in runs
    ]


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
            f"{run} runs on data {data}, and {table} has rows of the same experiment on other data "
            f"({others}): they are not compared with each other",
            stacklevel=2,
        )
