"""A progress bar where somebody may be watching."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int | None], None]


@contextmanager
def progress_bar(
    progress: bool | Progress | None, title: str, total: int | None
) -> Iterator[Callable[[], None]]:
    """Gives a function to be called after each batch."""
    done = 0
    if callable(progress):
        told = progress

        def tell() -> None:
            nonlocal done
            done += 1
            told(done, total)

        yield tell
        return
    if progress is None:
        # a single batch is over before a bar says anything
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
        task = bar.add_task(f"looking at {title}", total=total)
        yield lambda: bar.advance(task)
