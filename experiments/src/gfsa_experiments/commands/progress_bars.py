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


@contextmanager
def progress_bars(
    console: Console, runs: int
) -> Iterator[tuple[Callable[[Run], ProgressCallback], Callable[[], None]]]:
    """A bar for all runs, and a bar for the steps of the current one, if it reports steps.

    Gives a function that makes the progress callback of a run, and one that advances the bar of all
    runs. Runs at the same time report no steps.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        all_runs = bars.add_task("runs", total=runs)
        current = bars.add_task("steps", total=None, visible=False)

        def callback_of(run: Run) -> ProgressCallback:
            bars.reset(current, description=str(run), visible=True)

            def update(done: int, total: int, status: str) -> None:
                bars.update(current, completed=done, total=total, description=f"{run}, {status}")

            return update

        yield callback_of, lambda: bars.advance(all_runs)
