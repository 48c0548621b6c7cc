"""The result of a run as a row of ``results/RECIPE.csv``, written and read without pandas."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gfsa.lens.readings import printable
from gfsa_experiments.runs.csv_table import append_lines, check_table, has_header, read_table


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
    def experiment(self) -> Experiment:
        """The key of rows that are compared with each other, if they are on the same data."""
        return self.recipe, self.task, self.settings

    @property
    def key(self) -> tuple[object, ...]:
        """What identifies the run."""
        return (*self.experiment[:2], self.method, self.options, self.settings, self.seed)

    @property
    def name(self) -> str:
        """The method with its options."""
        return f"{self.method} {self.options}".strip()


Experiment = tuple[str, str, str]
COLUMNS = [field.name for field in fields(Row)]


def check_rows_fit(path: Path) -> None:
    """Raise ValueError if rows cannot be appended to ``path``."""
    check_table(path, COLUMNS)


def append_rows(path: Path, rows: list[Row]) -> None:
    """Append rows to a table; several processes may do so at the same time."""
    lines = [{k: "" if v is None else v for k, v in asdict(row).items()} for row in rows]
    append_lines(path, COLUMNS, lines, end="\r\n")


def read_rows_if_any(path: Path) -> list[Row]:
    """The rows of a table, which may not exist yet."""
    return read_rows(path) if has_header(path) else []


def read_rows(path: Path) -> list[Row]:
    """The rows of a table, typed; a ValueError names the file, the line and the column."""
    lines = read_table(path)
    _, header = next(lines, ("", []))
    if header != COLUMNS:
        missing = [name for name in COLUMNS if name not in header]
        unknown = [name for name in header if name not in COLUMNS]
        raise ValueError(
            f"{path} has other columns than a table of runs, {', '.join(COLUMNS)}; "
            f"missing: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(unknown) or 'none'}"
        )
    return [Row(**_typed(dict(zip(header, cells, strict=True)), where)) for where, cells in lines]


def _typed(line: dict[str, str], where: str) -> dict[str, Any]:
    """The cells of a line by column, as the types that :class:`Row` has."""
    values: dict[str, Any] = {}
    for field in fields(Row):
        text, kind = line.get(field.name, ""), str(field.type)
        try:
            values[field.name] = _value(text, kind)
        except (ValueError, KeyError):
            raise ValueError(
                f"{where}, column {field.name}: expected {kind}, got {text!r}"
            ) from None
    return values


def _value(text: str, kind: str) -> Any:
    """A cell as a value of a type: ``int``, ``float | None`` …"""
    if kind.endswith("| None") and text == "":
        return None
    if kind.startswith("int"):
        return int(text)
    if kind.startswith("float"):
        return float(text)
    if kind == "bool":
        return {"True": True, "False": False}[text]
    # tables print these
    return printable(text)
