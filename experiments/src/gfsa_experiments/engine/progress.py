"""Bars in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from rich.console import Console

    from gfsa_experiments.runs.run import Progress as Told
    from gfsa_experiments.runs.run import Run

Bars = tuple["Callable[[Run], Told] | None", Callable[[], None]]


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


@contextmanager
def one_at_a_time(console: Console, runs: int) -> Iterator[Bars]:
    """A bar for all runs, and one for the steps of the present one."""
    with _bars(console) as bars:
        everything = bars.add_task("runs", total=runs)
        present = bars.add_task("steps", total=None)

        def of(run: Run) -> Told:
            bars.reset(present, description=str(run))

            def tell(done: int, total: int, words: str) -> None:
                bars.update(present, completed=done, total=total, description=f"{run}, {words}")

            return tell

        yield of, lambda: bars.advance(everything)


@contextmanager
def many(console: Console, runs: int) -> Iterator[Bars]:
    """One bar for all runs; several at once have no bars of their own."""
    with _bars(console) as bars:
        everything = bars.add_task("runs", total=runs)
        yield None, lambda: bars.advance(everything)
