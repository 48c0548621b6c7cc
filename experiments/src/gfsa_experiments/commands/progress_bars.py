"""Progress of ``gfsa train``: bars on a terminal, lines in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from rich.console import Console

    from gfsa_experiments.engine.progress import Progress as ProgressCallback
    from gfsa_experiments.engine.progress import Report
    from gfsa_experiments.runs.run import Run


@contextmanager
def progress_bars(
    console: Console, runs: int
) -> Iterator[tuple[Callable[[Run], ProgressCallback], Callable[[], None]]]:
    """A bar for all runs, and a bar for the steps of the current one, if it reports steps.

    Gives a function that makes the progress callback of a run, and one that advances the bar of all
    runs. Runs at the same time report no steps. Where the output is no terminal (nohup, a job of a
    cluster), which bars are not drawn on, a line is printed at each evaluation.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        all_runs = bars.add_task("runs", total=runs)
        current = bars.add_task("steps", total=None, visible=False)

        def callback_of(run: Run) -> ProgressCallback:
            bars.reset(current, description=str(run), visible=True)

            def update(report: Report) -> None:
                status = f"{run}, {report.status}"
                bars.update(current, completed=report.step, total=report.total, description=status)
                if report.valid is not None and not console.is_terminal:
                    print_line(console, f"{run}: {report.line}")

            return update

        yield callback_of, lambda: bars.advance(all_runs)


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """One line, as it is and at once, however wide the output is taken to be."""
    console.print(text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)
    console.file.flush()
