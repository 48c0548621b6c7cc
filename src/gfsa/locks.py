"""One process at a time, where two would spoil each other's files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

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
    with path.open("a") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
