"""Files that are tables: csv, tsv, JSON lines, JSON and parquet, and tables of the hub."""

from __future__ import annotations

import csv
import importlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfsa_experiments.data.own import ending_of, first_lines, text_of

ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")

Numbered = Iterator[tuple[int, Sequence[Any]]]


@dataclass(frozen=True)
class Table:
    """A table whose cells are read when they are asked for."""

    where: str
    """The file, for messages."""
    columns: list[str]
    rows: Callable[[Sequence[int]], Numbered]
    """Numbered rows: the cells at the given places, none if a row has more or fewer fields."""
    begin: str
    """Its first lines, to follow an error."""
    place: str = "line"


def open_table(path: Path) -> Table:
    """The table in a file, by its ending."""
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


def _from_csv(path: Path, text: str, begin: str) -> Table:
    """A table with a header; a tsv has no quoting, a csv has that of spreadsheets."""
    head = text.split("\n", 1)[0]
    comma = "\t" if ending_of(path) == ".tsv" else max((",", ";", "\t"), key=head.count)
    # a quote in a tsv is a part of its text, as in GLUE's files
    quoting = csv.QUOTE_NONE if comma == "\t" else csv.QUOTE_MINIMAL
    # strict: a quote that is not closed would make one field of all lines up to the next quote
    options: dict[str, Any] = {"delimiter": comma, "quoting": quoting, "strict": True}
    lines = [line + "\n" for line in text.replace("\r\n", "\n").split("\n")]

    def records() -> Numbered:
        reader, first = csv.reader(lines, **options), 1
        try:
            for cells in reader:
                yield reader.line_num, cells
                first = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(
                f"{path}, row from line {first} to {reader.line_num}: {error}; is a quote not "
                f"closed, or one inside of quotes not written twice?{begin}"
            ) from error

    header = [name.strip() for name in next(records())[1]]

    def rows(places: Sequence[int]) -> Numbered:
        for number, cells in itertools.islice(records(), 1, None):
            if cells:
                kept = cells if len(cells) == len(header) else []
                yield number, [kept[at] for at in places if kept]

    return Table(str(path), header, rows, begin)


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


def _from_json(path: Path, text: str, begin: str) -> Table:
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


def _from_objects(path: Path, numbered: list[tuple[int, dict[str, Any]]], begin: str) -> Table:
    columns = list(dict.fromkeys(key for _, value in numbered for key in value))

    def rows(places: Sequence[int]) -> Numbered:
        for number, value in numbered:
            yield number, [value.get(columns[at]) for at in places]

    return Table(str(path), columns, rows, begin)


def _from_parquet(path: Path) -> Table:
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

    return Table(str(path), columns, rows, "", place="row")


def hub_table(where: str, part: Any) -> Table:
    """One part of a data set of the hub."""
    columns = list(part.column_names)

    def rows(places: Sequence[int]) -> Numbered:
        cells = [_cells(part, columns[at]) for at in places]
        return iter(enumerate(zip(*cells, strict=True), start=1))

    return Table(where, columns, rows, "", place="row")


def _cells(part: Any, column: str) -> list[Any]:
    """The values of a column of the hub; numbered classes by their names."""
    names = getattr(getattr(part, "features", {}).get(column), "names", None)
    values = list(part[column])
    if names is None:
        return values
    # the hub writes -1 where a label is hidden
    return [None if value is None or value < 0 else names[value] for value in values]
