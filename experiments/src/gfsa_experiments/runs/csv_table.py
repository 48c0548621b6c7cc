"""CSV tables that grow a row at a time, by several processes if need be."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gfsa_experiments.runs.locks import locked


def check_table(path: Path, columns: Sequence[str], added: Sequence[str] = ()) -> None:
    """Raise ValueError if rows of ``columns`` cannot be added to ``path``, which may be new.

    Args:
        added: columns that tables of earlier versions lack.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{existing} cannot be written to; name another place")
    if not path.exists() or path.stat().st_size == 0:
        return
    header = _header(path)
    if not fits(header, columns, added):
        raise ValueError(
            f"{path} has other columns than this version writes; "
            f"expected {', '.join(columns)}, got {', '.join(header)}; move it away first"
        )


def fits(header: Sequence[str], columns: Sequence[str], added: Sequence[str] = ()) -> bool:
    """Whether a table has these columns in this order, perhaps without some that were added."""
    return list(header) == [name for name in columns if name in header or name not in added]


def append_lines(
    path: Path,
    columns: Sequence[str],
    lines: Sequence[Mapping[str, Any]],
    end: str,
    added: Sequence[str] = (),
) -> None:
    """Add ``lines`` to the table at ``path``, made with a header if it is new or empty.

    Args:
        end: what the table's lines end with.
        added: columns that tables of earlier versions lack; such a table gets them, empty.
    """
    with locked(path, wait=True):
        check_table(path, columns, added)
        if path.stat().st_size and _header(path) != list(columns):
            _widen(path, columns, end)
    # widening has put another file in its place, which wants a lock of its own
    with locked(path, wait=True):
        with path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    # a write was cut short: what follows begins a line of its own
                    file.write(end.encode())
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator=end)
            if not size:
                writer.writeheader()
            writer.writerows(lines)


def _header(path: Path) -> list[str]:
    with path.open(newline="") as file:
        try:
            return next(csv.reader(file))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not CSV: {error}; move it away first") from error


def _widen(path: Path, columns: Sequence[str], end: str) -> None:
    """Give a table the columns that it lacks, empty; whole or not at all."""
    with path.open(newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader)
            lines = list(reader)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not CSV: {error}; repair it first") from error
    for number, line in enumerate(lines, start=2):
        if len(line) != len(header):
            raise ValueError(
                f"{path}, row {number}: expected {len(header)} columns, got {len(line)}; the file "
                "is damaged (a write cut short, or an edit): repair or remove the row"
            )
    # results may be a link to another folder
    place = path.resolve()
    unfinished = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with unfinished.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator=end)
            writer.writeheader()
            writer.writerows(dict(zip(header, line, strict=True)) for line in lines)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(place, unfinished)
        unfinished.replace(place)
    finally:
        unfinished.unlink(missing_ok=True)
