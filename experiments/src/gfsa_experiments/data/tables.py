"""Tables of a caller's own: csv, tsv, JSON lines, JSON, parquet, or a data set of the hub.

A file is one table; a folder, or a data set of the hub, has a table for each part that it names.
"""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfsa_experiments.data.files import BadRows
from gfsa_experiments.data.hub import load_parts
from gfsa_experiments.data.own import (
    HUB,
    ending_of,
    entries_of,
    find_own,
    first_lines,
    is_hidden,
    text_of,
)
from gfsa_experiments.data.splits import part_of

ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")
_EXPECTED = f"a file or folder of tables ({', '.join(ENDINGS)}), or hub:ID"

Numbered = Iterator[tuple[int, Sequence[Any]]]


@dataclass(frozen=True)
class Rows:
    """The wanted columns of the rows that can be used, and the parts that the data names.

    Args:
        where: the data, for messages.
        values: of each row, the cells of the wanted columns as text.
        parts: the rows of each part; ``{"train": all}`` if the data names none.
        unused: parts that are neither to train, validate nor test on.
    """

    where: str
    values: list[tuple[str, ...]]
    parts: dict[str, list[int]]
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Table:
    where: str
    columns: list[str]
    rows: Callable[[Sequence[int]], Numbered]
    """Numbered rows, the cells at the given places."""
    begin: str
    """Its first lines, to follow an error."""
    place: str = "line"


def read_rows(data: str, data_dir: Path, columns: Sequence[str], settings: Sequence[str]) -> Rows:
    """The wanted columns of all tables of ``data``.

    Args:
        data: a file, a folder or ``hub:ID``.
        data_dir: where a relative path may begin.
        columns: the columns that are wanted.
        settings: the setting that names each of them, for messages.
    """
    if data.startswith(HUB):
        parts, unused = load_parts(data)
        tables = {part: [_from_hub(f"{data} {part}", found)] for part, found in parts.items()}
        return _rows(data, tables, columns, settings, unused)
    path = find_own(data, data_dir, _EXPECTED)
    return _rows(str(path), _tables_of(path), columns, settings)


def columns_in(path: Path) -> tuple[list[str], str]:
    """The columns of a table in a file, and its first lines, to follow an error."""
    table = _open(path)
    return table.columns, table.begin


def texts_of(path: Path, column: str) -> list[str]:
    """One column of a table in a file, empty cells included; the setting ``text`` names it."""
    return _texts(_open(path), column)


def texts_of_hub(where: str, part: Any, column: str) -> list[str]:
    """One column of a table of the hub, empty cells included."""
    return _texts(_from_hub(where, part), column)


def _texts(table: _Table, column: str) -> list[str]:
    _refuse_missing(table, [column], ["text"])
    found = []
    for number, cells in table.rows([table.columns.index(column)]):
        cell = cells[0] if cells else None
        if not isinstance(cell, str | None):
            raise ValueError(
                f"{table.where}, {table.place} {number}: expected a text in the column {column}, "
                f"got {type(cell).__name__}; set text= to the column of the text{table.begin}"
            )
        found.append(cell or "")
    return found


def _refuse_missing(table: _Table, columns: Sequence[str], settings: Sequence[str]) -> None:
    """Raise ValueError if a table lacks a wanted column."""
    for column, setting in zip(columns, settings, strict=True):
        if column not in table.columns:
            raise ValueError(
                f"{table.where} has no column {column!r}; it has "
                f"{', '.join(table.columns) or 'none'}: set {setting}= to one of them{table.begin}"
            )


def _tables_of(path: Path) -> dict[str, list[_Table]]:
    if path.is_file():
        return {"train": [_open(path)]}
    files = sorted(
        p
        for p in path.rglob("*")
        if p.is_file() and ending_of(p) in ENDINGS and not is_hidden(p, path)
    )
    if not files:
        raise ValueError(
            f"{path} has no table: expected files that end in {', '.join(ENDINGS)}"
            f"{entries_of(path)}"
        )
    parts = {file: part_of(file, path) for file in files}
    without = [file.name for file, part in parts.items() if part is None]
    if len(without) == len(files):
        return {"train": [_open(file) for file in files]}
    if without:
        raise ValueError(
            f"{path} has files that are named after parts and others that are not, "
            f"{', '.join(without[:5])}: name all of them after train, valid or test, or none"
        )
    found: dict[str, list[_Table]] = {}
    for file, part in parts.items():
        found.setdefault(str(part), []).append(_open(file))
    return found


def _rows(
    where: str,
    tables: dict[str, list[_Table]],
    columns: Sequence[str],
    settings: Sequence[str],
    unused: tuple[str, ...] = (),
) -> Rows:
    values: list[tuple[str, ...]] = []
    parts: dict[str, list[int]] = {}
    for part, of_part in tables.items():
        begin = len(values)
        for table in of_part:
            values += _usable(table, columns, settings)
        parts[part] = list(range(begin, len(values)))
    return Rows(where, values, parts, unused)


def _usable(
    table: _Table, columns: Sequence[str], settings: Sequence[str]
) -> list[tuple[str, ...]]:
    """The rows of one table that have a text in every wanted column."""
    _refuse_missing(table, columns, settings)
    places = [table.columns.index(column) for column in columns]
    bad, found = BadRows(table.where, place=table.place), []
    for number, cells in table.rows(places):
        if len(cells) < len(columns):
            bad.add(number, f"it has more or fewer fields than the {len(table.columns)} columns")
            continue
        # NaN stands for a missing cell in many tables
        texts = tuple("" if cell is None or cell != cell else str(cell).strip() for cell in cells)
        empty = [column for column, text in zip(columns, texts, strict=True) if not text]
        if empty:
            bad.add(number, f"nothing in the column {', '.join(empty)}")
        else:
            found.append(texts)
    try:
        bad.report(len(found))
    except ValueError as error:
        raise ValueError(f"{error}{table.begin}") from error
    return found


def _open(path: Path) -> _Table:
    ending = ending_of(path)
    if ending == ".parquet":
        return _from_parquet(path)
    if ending not in ENDINGS:
        raise ValueError(
            f"{path} ends in {ending or 'nothing'}: expected {', '.join(ENDINGS)}, the text ones "
            "plain or with .xz or .gz behind it; export the table as csv"
        )
    text = text_of(path)
    begin = first_lines(text.splitlines())
    if not text.strip():
        raise ValueError(f"{path} is empty")
    if ending in (".csv", ".tsv"):
        return _from_csv(path, text, begin)
    if ending == ".json":
        return _from_json(path, text, begin)
    return _from_objects(path, list(_objects(path, text, begin)), begin)


def _from_csv(path: Path, text: str, begin: str) -> _Table:
    """A table with a header; a tsv has no quoting, a csv has that of spreadsheets."""
    head = text.split("\n", 1)[0]
    comma = "\t" if ending_of(path) == ".tsv" else max((",", ";", "\t"), key=head.count)
    # a quote in a tsv is a part of its text, as in GLUE's files
    quoting = csv.QUOTE_NONE if comma == "\t" else csv.QUOTE_MINIMAL
    options: dict[str, Any] = {"delimiter": comma, "quoting": quoting}
    lines = [line + "\n" for line in text.replace("\r\n", "\n").split("\n")]
    header = [name.strip() for name in next(csv.reader(lines, **options))]

    def rows(places: Sequence[int]) -> Numbered:
        reader = csv.reader(lines, **options)
        next(reader)
        try:
            for cells in reader:
                if cells:
                    kept = cells if len(cells) == len(header) else []
                    yield reader.line_num, [kept[at] for at in places if kept]
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {reader.line_num}: {error}; is a quote not closed?{begin}"
            ) from error

    return _Table(str(path), header, rows, begin)


def _objects(path: Path, text: str, begin: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: expected a JSON object, got {error}{begin}"
            ) from error
        if not isinstance(value, dict):
            raise ValueError(
                f"{path}, line {number}: expected a JSON object, got a {type(value).__name__}"
                f"{begin}"
            )
        yield number, value


def _from_json(path: Path, text: str, begin: str) -> _Table:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: expected a list of JSON objects, got {error}; one object per line is a "
            f".jsonl{begin}"
        ) from error
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError(
            f"{path}: expected a list of JSON objects, got a {type(values).__name__}{begin}"
        )
    return _from_objects(path, list(enumerate(values, start=1)), begin)


def _from_objects(path: Path, numbered: list[tuple[int, dict[str, Any]]], begin: str) -> _Table:
    columns = list(dict.fromkeys(key for _, value in numbered for key in value))

    def rows(places: Sequence[int]) -> Numbered:
        for number, value in numbered:
            yield number, [value.get(columns[at]) for at in places]

    return _Table(str(path), columns, rows, begin)


def _from_parquet(path: Path) -> _Table:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ValueError(f"{path}: pip install pyarrow, which reads parquet files") from None
    try:
        table = parquet.read_table(path)
    except (ValueError, OSError) as error:
        # the library's errors are kinds of these
        raise ValueError(
            f"{path} is damaged, or no parquet file ({error}); it begins with "
            f"{path.read_bytes()[:16]!r}"
        ) from error
    columns = list(table.column_names)

    def rows(places: Sequence[int]) -> Numbered:
        cells = [table.column(columns[at]).to_pylist() for at in places]
        return iter(enumerate(zip(*cells, strict=True), start=1))

    return _Table(str(path), columns, rows, "", place="row")


def _from_hub(where: str, part: Any) -> _Table:
    columns = list(part.column_names)

    def rows(places: Sequence[int]) -> Numbered:
        cells = [_cells(part, columns[at]) for at in places]
        return iter(enumerate(zip(*cells, strict=True), start=1))

    return _Table(where, columns, rows, "", place="row")


def _cells(part: Any, column: str) -> list[Any]:
    """The values of a column of the hub; numbered classes by their names."""
    names = getattr(getattr(part, "features", {}).get(column), "names", None)
    values = list(part[column])
    if names is None:
        return values
    # the hub writes -1 where a label is hidden
    return [None if value is None or value < 0 else names[value] for value in values]
