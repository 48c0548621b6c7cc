"""A progress bar for terminals, or calls of a progress function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int | None], None]


@contextmanager
def progress_bar(
    progress: bool | Progress | None, title: str, total: int | None
) -> Iterator[Callable[[], None]]:
    """Yields a function that the caller calls after each batch."""
    if callable(progress):
        report, done = progress, 0

        def advance() -> None:
            nonlocal done
            done += 1
            report(done, total)

        yield advance
        return
    if progress is None:
        # a single batch needs no bar
        progress = sys.stderr.isatty() and total != 1
    if not progress:
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ImportError:
        raise ImportError("a progress bar needs rich: pip install 'gfsa[cli]'") from None
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"measuring {title}", total=total)
        yield lambda: bar.advance(task)
