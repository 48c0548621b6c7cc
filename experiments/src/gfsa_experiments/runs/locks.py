"""One process at a time, where two would spoil each other's files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # a system without it: nothing is locked there
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def locked(path: Path, wait: bool) -> Iterator[None]:
    """Hold a lock file; the system lets go of it when the process ends, however it ends.

    Raises:
        BlockingIOError: if another process holds it and ``wait`` is false.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # whoever held it may have put another file in its place, which is not locked yet
            if fcntl is None or _is_at(path, file):
                yield
                return


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
