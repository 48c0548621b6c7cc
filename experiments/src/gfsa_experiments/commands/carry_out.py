"""Carry out the runs of ``gfsa train``: progress, the row of each, and what to do at Ctrl-C."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gfsa_experiments.engine.checkpoints import newest_step
from gfsa_experiments.runs.data import has_row
from gfsa_experiments.runs.row import Row, append_rows
from gfsa_experiments.runs.run import Run
from gfsa_experiments.runs.run_many import carry_out_all

if TYPE_CHECKING:
    from rich.console import Console

    from gfsa_experiments.engine.measure import Progress as ProgressCallback
    from gfsa_experiments.engine.measure import Report


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


# below this mean |coefficient − start|, a learned filter is ordinary attention in effect
_HARDLY_MOVED = 1e-3


def carry_out(console: Console, runs: list[Run], jobs: int, results: Path, write: bool) -> int:
    """Run everything, append each row as it comes, and return the number of failed runs."""
    if jobs > 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise typer.BadParameter(
            "--jobs needs a single process, but accelerate launch has started several"
        )
    finished_before = {run.folder for run in runs if run.is_resumed_and_finished}
    names = _names(runs)
    # error → the runs that failed with it
    failures: dict[str, list[str]] = defaultdict(list)
    # the largest mean movement of the coefficients that hardly moved, by the name of their row
    at_rest: dict[str, float] = {}
    try:
        with progress_bars(console, len(runs)) as (progress, advance):
            for finished in carry_out_all(runs, jobs, progress):
                run, row, error = finished.run, finished.row, finished.error
                before = run.folder in finished_before
                if row is not None and write:
                    error = "; ".join(filter(None, [error, _append(results, run, row, before)]))
                if row is None or error:
                    failures[error].append(names[run.folder])
                    # wrong data makes every run fail alike: the reason is printed once
                    if len(failures[error]) == 1:
                        print_line(console, f"failed: {names[run.folder]}: {error}", style="red")
                else:
                    said = "finished before: " if before else ""
                    score = f"{row.metric} {row.test:.4f}"
                    print_line(console, f"{said}{names[run.folder]}: {score}")
                    if row.added and row.moved is not None and row.moved < _HARDLY_MOVED:
                        at_rest[row.name] = max(row.moved, at_rest.get(row.name, 0.0))
                advance()
    except KeyboardInterrupt:
        print_line(console, _interrupted(runs, names), style="yellow")
        raise
    for first, *others in failures.values():
        if others:
            more = "1 more run" if len(others) == 1 else f"{len(others)} more runs"
            print_line(console, f"failed: {more} for the reason of {first}", style="red")
    for name, moved in at_rest.items():
        message = (
            f"{name}: coefficients moved by at most {moved:.1g} in the mean, so the model is "
            "plain in effect; --set filter_lr=1e-2 would give them a learning rate of their own"
        )
        print_line(console, message, style="yellow")
    failed = sum(map(len, failures.values()))
    shown = "; gfsa results shows the tables" if failed < len(runs) else ""
    console.print(f"{len(runs) - failed} of {len(runs)} runs done{shown}")
    return failed


def _interrupted(runs: Sequence[Run], names: Mapping[Path, str]) -> str:
    """What the same command with --resume does for each run that has begun."""
    said = []
    for run in runs:
        step, name = newest_step(run.folder / "checkpoints"), names[run.folder]
        if (run.folder / "row.json").exists():
            said.append(f"{name} is done")
        elif step:
            said.append(f"{name} goes on after step {step}")
        elif (run.folder / "config.json").exists():
            said.append(f"{name} has no checkpoint and begins with step 1")
    return "; ".join(
        ["interrupted; the same command with --resume goes on", *(said or ["no run had begun"])]
    )


def _append(results: Path, run: Run, row: Row, was_finished: bool) -> str:
    """Append a run's row to its table; returns why it could not be, if so."""
    table = results / f"{row.recipe}.csv"
    try:
        # of several rows of a run the latest counts; a run that was finished before usually has
        # its row in the table
        if not was_finished or not has_row(table, row):
            append_rows(table, [row])
    except (ValueError, OSError) as reason:
        # the other runs continue
        return f"its row is in {run.folder / 'row.json'}, --resume adds it: {reason}"
    return ""


def _names(runs: Sequence[Run]) -> dict[Path, str]:
    """The name of each run, with the settings that not all of them share."""
    settings = {run.folder: run.key().settings.split() for run in runs}
    shared = set.intersection(*map(set, settings.values()))
    own = {
        folder: " ".join(word for word in words if word not in shared)
        for folder, words in settings.items()
    }
    return {run.folder: f"{run} {own[run.folder]}".rstrip() for run in runs}
