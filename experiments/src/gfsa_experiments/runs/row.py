"""The result of a run as a row of ``results/RECIPE.csv``, which several processes may append to."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from filelock import FileLock

from gfsa.lens.readings import printable
from gfsa_experiments.engine.config import parse
from gfsa_experiments.engine.whole_files import refuse_inside_file


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was run, on which data and machine, and the result."""

    recipe: str
    task: str
    """Data set and model, e.g. ``cola`` or ``cifar10 deit_tiny-d24``."""
    method: str
    """The name given to ``--method``."""
    options: str
    """The method's options that differ from its defaults, ``K=4 learn=wK``; empty for none."""
    settings: str
    """The recipe's settings that differ from its defaults, without the seed."""
    seed: int
    metric: str
    higher_is_better: bool
    test: float
    valid: float | None = None
    others: str = ""
    """Further metrics of the test split, ``f1=0.81 accuracy=0.9``."""
    parameters: int = 0
    """Trainable numbers of the whole model."""
    added: int = 0
    """Trainable numbers that the method added."""
    moved: float | None = None
    """Mean |coefficient − its start| over the filters' learned numbers at the end."""
    coefficients: str = ""
    """Mean over heads and layers of the final polynomial's c0 c1 c2 …, for filters."""
    epochs: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    """Training time without evaluation and setup."""
    seconds_per_step: float = 0.0
    peak_memory_mib: float | None = None
    """Of the GPU."""
    jobs: int = 1
    """Number of runs that shared the machine; times are comparable only if it is 1."""
    device: str = ""
    precision: str = ""
    torch: str = ""
    gfsa: str = ""
    commit: str = ""
    date: str = ""
    command: str = ""
    data: str = ""
    """The fingerprint of the data, ``45000+5000+10000 3fa2c1d0``: the sizes of train, valid and
    test, and a hash of some examples; empty if it was not recorded."""

    @property
    def key(self) -> tuple[object, ...]:
        """What identifies the run."""
        return self.recipe, self.task, self.method, self.options, self.settings, self.seed


_TYPES = get_type_hints(Row)
COLUMNS = list(_TYPES)


def append_rows(path: Path, rows: list[Row]) -> None:
    """Append rows to a table; several processes may do so at the same time."""
    append_lines(path, COLUMNS, [asdict(row) for row in rows], end="\r\n")


def read_rows(path: Path) -> list[Row]:
    """The rows of a table, typed, none before the first is written.

    A ValueError names the file, the line and the column.
    """
    if not _has_header(path):
        return []
    lines = _read_table(path)
    _check_header(path, next(lines)[1], COLUMNS)
    return [Row(**_typed(cells, where)) for where, cells in lines]


def _typed(cells: Sequence[str], where: str) -> dict[str, Any]:
    """The cells of a line by column, as the types that :class:`Row` has."""
    values: dict[str, Any] = {}
    for name, text in zip(COLUMNS, cells, strict=True):
        # of the types only the optional ones have parts
        is_missing = not text and get_args(_TYPES[name])
        try:
            # tables print text, so control characters are escaped
            values[name] = parse(name, "none" if is_missing else printable(text), _TYPES[name])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return values


def check_table(path: Path, columns: Sequence[str] = COLUMNS) -> None:
    """Raise ValueError if rows of ``columns`` cannot be appended to ``path``, which may be new."""
    refuse_inside_file(path)
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{existing} is not writable; choose another place")
    if _has_header(path):
        _check_header(path, next(_read_table(path))[1], columns)


def _check_header(path: Path, header: Sequence[str], columns: Sequence[str]) -> None:
    if [*header] != [*columns]:
        missing = ", ".join(name for name in columns if name not in header)
        unknown = ", ".join(name for name in header if name not in columns)
        raise ValueError(
            f"{path} has other columns than this version writes, {', '.join(columns)}; missing: "
            f"{missing or 'none'}; unknown: {unknown or 'none'}; move it away first"
        )


def append_lines(
    path: Path, columns: Sequence[str], lines: Sequence[Mapping[str, Any]], end: str
) -> None:
    """Append ``lines`` to the table at ``path``; ``end`` ends a line, a new table gets a header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # results may be a link, and two names of a table need one lock
    place = path.resolve()
    with FileLock(place.with_name(f".{place.name}.lock")):
        check_table(path, columns)
        is_new = not _has_header(path)
        if not is_new and path.read_bytes()[-1:] != b"\n":
            # a write was interrupted: the next row begins a line of its own
            with path.open("ab") as file:
                file.write(end.encode())
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator=end)
            if is_new:
                writer.writeheader()
            writer.writerows(lines)


def _has_header(path: Path) -> bool:
    """Whether there is a table; an empty file is left if a machine stops before the first row."""
    return path.exists() and path.stat().st_size > 0


def _read_table(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Each line of a table, the header first, with its place for messages: ``runs.csv, line 3``."""
    # spreadsheets write a byte order mark
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        header: list[str] = []
        try:
            for cells in reader:
                header = header or cells
                where = f"{path}, line {reader.line_num}"
                if len(cells) != len(header):
                    raise ValueError(
                        f"{where}: expected {len(header)} columns, got {len(cells)}; the file is "
                        "damaged (an interrupted write, or an edit): repair or remove the line"
                    )
                yield where, cells
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}, after line {reader.line_num}: not CSV: {error}; repair it or move it away"
            ) from error
