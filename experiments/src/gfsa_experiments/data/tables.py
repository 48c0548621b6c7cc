"""The columns of a caller's own tables, from files (:mod:`.table_files`) or from the hub.

A file is one table; a folder, or a data set of the hub, has a table for each part that it names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfsa_experiments.data.files import BadRows
from gfsa_experiments.data.hub import load_parts
from gfsa_experiments.data.own import HUB, ending_of, entries_of, find_own, is_hidden
from gfsa_experiments.data.splits import part_of
from gfsa_experiments.data.table_files import ENDINGS, Table, hub_table, open_table

_EXPECTED = f"a file or folder of tables ({', '.join(ENDINGS)}), or hub:ID"

_HALF = re.compile("[\ud800-\udfff]")


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


def read_rows(
    data: str,
    data_dir: Path,
    columns: Sequence[str],
    settings: Sequence[str],
    may_be_empty: Sequence[str] = (),
) -> Rows:
    """The wanted columns of all tables of ``data``.

    Args:
        data: a file, a folder or ``hub:ID``.
        data_dir: where a relative path may begin.
        columns: the columns that are wanted.
        settings: the setting that names each of them, for messages.
        may_be_empty: columns that a row can be used without; the text is then empty.
    """
    if data.startswith(HUB):
        parts, unused = load_parts(data)
        tables = {part: hub_table(f"{data} {part}", found) for part, found in parts.items()}
        hidden = [part for part in tables if part != "train" and _is_hidden(tables[part], columns)]
        unused += tuple(f"{part}, whose {columns[-1]} is hidden" for part in hidden)
        shown = {part: [table] for part, table in tables.items() if part not in hidden}
        return _rows(data, shown, columns, settings, unused, may_be_empty)
    path = find_own(data, data_dir, _EXPECTED)
    return _rows(str(path), _tables_of(path), columns, settings, may_be_empty=may_be_empty)


def columns_in(path: Path) -> tuple[list[str], str]:
    """The columns of a table in a file, and its first lines, to follow an error."""
    table = open_table(path)
    return table.columns, table.begin


def texts_of(path: Path, column: str) -> list[str]:
    """One column of a table in a file, empty cells included; the setting ``text`` names it."""
    return _texts(open_table(path), column)


def texts_of_hub(where: str, part: Any, column: str) -> list[str]:
    """One column of a table of the hub, empty cells included."""
    return _texts(hub_table(where, part), column)


def _is_hidden(table: Table, columns: Sequence[str]) -> bool:
    """Whether no row has a label, the last of the columns, as in test sets of a contest."""
    if columns[-1] not in table.columns:
        return False
    place = table.columns.index(columns[-1])
    return all(cells[0] is None for _, cells in table.rows([place]))


def _texts(table: Table, column: str) -> list[str]:
    _refuse_missing(table, [column], ["text"])
    bad, found = BadRows(table.where, place=table.place), []
    for number, cells in table.rows([table.columns.index(column)]):
        if not cells:
            bad.add(number, _other_fields(table))
            continue
        cell = cells[0]
        if not isinstance(cell, str | None):
            raise ValueError(
                f"{table.where}, {table.place} {number}: expected a text in the column {column}, "
                f"got {type(cell).__name__}; set text= to the column of the text{table.begin}"
            )
        found.append(cell or "")
    _report(bad, len(found), table)
    return found


def _refuse_missing(table: Table, columns: Sequence[str], settings: Sequence[str]) -> None:
    """Raise ValueError if a table lacks a wanted column, or has it twice."""
    for column, setting in zip(columns, settings, strict=True):
        if column not in table.columns:
            raise ValueError(
                f"{table.where} has no column {column!r}; it has "
                f"{', '.join(table.columns) or 'none'}: set {setting}= to one of them{table.begin}"
            )
        if table.columns.count(column) > 1:
            raise ValueError(
                f"{table.where} has {table.columns.count(column)} columns {column!r}, and "
                f"{setting}= names one: rename them{table.begin}"
            )


def _tables_of(path: Path) -> dict[str, list[Table]]:
    if path.is_file():
        return {"train": [open_table(path)]}
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
        return {"train": [open_table(file) for file in files]}
    if without:
        raise ValueError(
            f"{path} has files that are named after parts and others that are not, "
            f"{', '.join(without[:5])}: name all of them after train, valid or test, or none"
        )
    found: dict[str, list[Table]] = {}
    for file, part in parts.items():
        found.setdefault(str(part), []).append(open_table(file))
    return found


def _rows(
    where: str,
    tables: dict[str, list[Table]],
    columns: Sequence[str],
    settings: Sequence[str],
    unused: tuple[str, ...] = (),
    may_be_empty: Sequence[str] = (),
) -> Rows:
    values: list[tuple[str, ...]] = []
    parts: dict[str, list[int]] = {}
    for part, of_part in tables.items():
        begin = len(values)
        for table in of_part:
            values += _usable(table, columns, settings, may_be_empty)
        parts[part] = list(range(begin, len(values)))
    return Rows(where, values, parts, unused)


def _usable(
    table: Table, columns: Sequence[str], settings: Sequence[str], may_be_empty: Sequence[str]
) -> list[tuple[str, ...]]:
    """The rows of one table that have a text in every wanted column."""
    _refuse_missing(table, columns, settings)
    places = [table.columns.index(column) for column in columns]
    bad, found = BadRows(table.where, place=table.place), []
    for number, cells in table.rows(places):
        if len(cells) < len(columns):
            bad.add(number, _other_fields(table))
            continue
        for column, cell in zip(columns, cells, strict=True):
            if isinstance(cell, bytes | list | dict):
                raise ValueError(
                    f"{table.where}, {table.place} {number}: expected a text or a number in the "
                    f"column {column}, got {type(cell).__name__}{table.begin}"
                )
        # NaN stands for a missing cell in many tables
        texts = tuple("" if cell is None or cell != cell else str(cell).strip() for cell in cells)
        named = zip(columns, texts, strict=True)
        empty = [column for column, text in named if not text and column not in may_be_empty]
        # JSON may have them; no tokenizer takes them
        half = next(filter(None, map(_HALF.search, texts)), None)
        if empty:
            bad.add(number, f"nothing in the column {', '.join(empty)}")
        elif half is not None:
            bad.add(number, f"{half[0]!r} is half of a pair, and no character of its own")
        else:
            found.append(texts)
    _report(bad, len(found), table)
    return found


def _other_fields(table: Table) -> str:
    return f"it has more or fewer fields than the {len(table.columns)} columns"


def _report(bad: BadRows, good: int, table: Table) -> None:
    """Warn of bad rows; an error shows the first lines of the file."""
    try:
        bad.report(good)
    except ValueError as error:
        raise ValueError(f"{error}{table.begin}") from error
