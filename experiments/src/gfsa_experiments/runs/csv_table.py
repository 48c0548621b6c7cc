"""CSV tables that several processes may append rows to."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from gfsa_experiments.engine.whole_files import refuse_inside_file


def check_table(path: Path, columns: Sequence[str]) -> None:
    """Raise ValueError if rows of ``columns`` cannot be appended to ``path``, which may be new."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    refuse_inside_file(path)
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{existing} is not writable; choose another place")
    if not has_header(path):
        return
    _, header = next(read_table(path))
    if header != list(columns):
        raise ValueError(
            f"{path} has other columns than this version writes; "
            f"expected {', '.join(columns)}, got {', '.join(header)}; move it away first"
        )


def has_header(path: Path) -> bool:
    """Whether there is a table; an empty file is left if a machine stops before the first row."""
    return path.exists() and path.stat().st_size > 0


def append_lines(
    path: Path, columns: Sequence[str], lines: Sequence[Mapping[str, Any]], end: str
) -> None:
    """Append ``lines`` to the table at ``path``; a new or empty table gets a header.

    Args:
        end: the line terminator of the table.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # results may be a link, and two names of a table need one lock
    place = path.resolve()
    with FileLock(place.with_name(f".{place.name}.lock")):
        check_table(path, columns)
        is_new = not has_header(path)
        with path.open("a+b") as file:
            if not is_new:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    # a write was interrupted: the next row begins a line of its own
                    file.write(end.encode())
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator=end)
            if is_new:
                writer.writeheader()
            writer.writerows(lines)


def read_table(path: Path) -> Iterator[tuple[str, list[str]]]:
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
