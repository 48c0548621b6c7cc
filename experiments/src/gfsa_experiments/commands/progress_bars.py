"""Progress bars of ``gfsa train``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from rich.console import Console

    from gfsa_experiments.engine.trainer import Progress as ProgressCallback
    from gfsa_experiments.runs.run import Run

Bars = tuple["Callable[[Run], ProgressCallback] | None", Callable[[], None]]
"""Makes the progress callback of a run, and advances the bar of all runs."""


@contextmanager
def each_run(console: Console, runs: int) -> Iterator[Bars]:
    """A bar for all runs, and a bar for the steps of the current one."""
    with _bars(console) as bars:
        all_runs = bars.add_task("runs", total=runs)
        current = bars.add_task("steps", total=None)

        def callback_of(run: Run) -> ProgressCallback:
            bars.reset(current, description=str(run))

            def update(done: int, total: int, status: str) -> None:
                bars.update(current, completed=done, total=total, description=f"{run}, {status}")

            return update

        yield callback_of, lambda: bars.advance(all_runs)


@contextmanager
def all_runs(console: Console, runs: int) -> Iterator[Bars]:
    """A bar for all runs, which run at the same time and have no bars of their own."""
    with _bars(console) as bars:
        task = bars.add_task("runs", total=runs)
        yield None, lambda: bars.advance(task)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
