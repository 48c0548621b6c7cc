"""The one line that a run leaves in ``results/``."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gfsa_experiments.runs.csv_table import append_lines, check_table, fits


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was run, on what, and what came out."""

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
    """Learned numbers of the whole model."""
    added: int = 0
    """Of which the method added."""
    moved: float | None = None
    """Mean |coefficient − its start| over the filters' learned numbers at the end."""
    coefficients: str = ""
    """Mean over heads and layers of the final polynomial's c0 c1 c2 …, for filters."""
    epochs: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    """Training time without evaluation and set-up."""
    seconds_per_step: float = 0.0
    peak_memory_mib: float | None = None
    """Of the GPU."""
    jobs: int = 1
    """How many runs shared the machine; times are comparable only where this is 1."""
    device: str = ""
    precision: str = ""
    torch: str = ""
    gfsa: str = ""
    commit: str = ""
    date: str = ""
    command: str = ""
    data: str = ""
    """What was trained and measured on, ``45000+5000+10000 3fa2c1d0``: examples in train, valid
    and test, and a hash of some of them; empty in rows of earlier versions."""


_COLUMNS = [field.name for field in fields(Row)]
# tables of earlier versions lack these; their rows have nothing to say there
_ADDED = ("data",)


def same_data(one: Row, other: Row) -> bool:
    """Whether two rows may be on the same data: one that does not say goes with any."""
    return not one.data or not other.data or one.data == other.data


def check_rows_fit(path: Path) -> None:
    """Raise ValueError if rows cannot be added to ``path``."""
    check_table(path, _COLUMNS, _ADDED)


def append_rows(path: Path, rows: list[Row]) -> None:
    """Add rows to a table, with a header if it is new; several processes may do so."""
    lines = [{k: "" if v is None else v for k, v in asdict(row).items()} for row in rows]
    append_lines(path, _COLUMNS, lines, end="\r\n", added=_ADDED)


def rows_of_experiment(path: Path, recipe: str, task: str, settings: str) -> list[Row]:
    """The rows that a run with these is compared with; none if there is no table yet."""
    # who is to add the first row begins with an empty file
    if not path.exists() or not path.stat().st_size:
        return []
    wanted = (recipe, task, settings)
    return [row for row in read_rows(path) if (row.recipe, row.task, row.settings) == wanted]


def has_row(path: Path, row: Row) -> bool:
    """Whether a table has a row of this very run, on the same data."""
    this = (row.method, row.options, row.seed)
    return any(
        (other.method, other.options, other.seed) == this and same_data(row, other)
        for other in rows_of_experiment(path, row.recipe, row.task, row.settings)
    )


def read_rows(path: Path) -> list[Row]:
    """The rows of a table, typed; ValueError names the file, the line and the column at fault."""
    names = _COLUMNS
    rows = []
    with path.open(newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            if not fits(header, names, _ADDED):
                missing = [name for name in names if name not in header]
                unknown = [name for name in header if name not in names]
                raise ValueError(
                    f"{path} has other columns than a table of runs, {', '.join(names)}; "
                    f"missing: {', '.join(missing) or 'none'}; "
                    f"unknown: {', '.join(unknown) or 'none'}"
                )
            for line in reader:
                where = f"{path}, line {reader.line_num}"
                if len(line) != len(header):
                    raise ValueError(
                        f"{where}: expected {len(header)} columns, got {len(line)}; the file is "
                        "damaged (a write cut short, or an edit): repair or remove the line"
                    )
                rows.append(Row(**_typed(dict(zip(header, line, strict=True)), where)))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, after line {reader.line_num}: not CSV: {error}") from error
    return rows


def _typed(line: dict[str, str], where: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in fields(Row):
        text, kind = line.get(field.name, ""), str(field.type)
        try:
            if kind.endswith("| None") and text == "":
                values[field.name] = None
            elif kind.startswith("int"):
                values[field.name] = int(text)
            elif kind.startswith("float"):
                values[field.name] = float(text)
            elif kind == "bool":
                values[field.name] = {"True": True, "False": False}[text]
            else:
                values[field.name] = text
        except (ValueError, KeyError):
            raise ValueError(
                f"{where}, column {field.name}: expected {kind}, got {text!r}"
            ) from None
    return values
