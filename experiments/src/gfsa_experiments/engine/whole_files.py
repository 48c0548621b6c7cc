"""Write files so that readers (other processes, resumed runs) see them complete or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[..., object]) -> None:
    """Call ``write(file)`` with a binary file that replaces ``path`` once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def refuse_inside_file(path: Path) -> None:
    """Raise ValueError if ``path`` is a folder or lies below a file: called before the work."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    above = next((place for place in path.absolute().parents if place.exists()), None)
    if above is not None and not above.is_dir():
        raise ValueError(f"{path} cannot be written: {above} is a file, not a folder")


def write_text(path: Path, text: str) -> None:
    """Write a whole UTF-8 file, with line ends as they are in ``text``."""
    write_whole(path, lambda file: file.write(text.encode()))
