"""CSV tables that grow a row at a time, by several processes if need be."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gfsa.locks import locked


def check_table(path: Path, columns: Sequence[str]) -> None:
    """Raise ValueError if rows of ``columns`` cannot be added to ``path``, which may be new."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{existing} cannot be written to; name another place")
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open(newline="") as file:
        try:
            header = next(csv.reader(file))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not CSV: {error}; move it away first") from error
    if header != list(columns):
        raise ValueError(
            f"{path} has other columns than this version writes; "
            f"expected {', '.join(columns)}, got {', '.join(header)}; move it away first"
        )


def append_lines(
    path: Path, columns: Sequence[str], lines: Sequence[Mapping[str, Any]], end: str
) -> None:
    """Add ``lines`` to the table at ``path``, made with a header if it is new or empty.

    Args:
        end: what the table's lines end with.
    """
    with locked(path, wait=True):
        check_table(path, columns)
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
