"""Carry out the runs of ``gfsa train``: progress, the row of each, and what to do at Ctrl-C."""

from __future__ import annotations

import os
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


@contextmanager
def resume_hint(console: Console, runs: Sequence[Run], names: Mapping[Path, str]) -> Iterator[None]:
    """Print at Ctrl-C how the runs can go on.

    Args:
        runs: all that are carried out.
        names: of each run, by its folder.
    """
    try:
        yield
    except KeyboardInterrupt:
        message = _message([run.folder for run in runs], names)
        print_line(console, message, style="yellow")
        raise


def _message(folders: Sequence[Path], names: Mapping[Path, str]) -> str:
    done = [folder for folder in folders if (folder / "row.json").exists()]
    steps = {folder: newest_step(folder / "checkpoints") for folder in folders}
    begun = {folder: step for folder, step in steps.items() if step and folder not in done}
    # a run writes its settings before anything else
    lost = [
        folder
        for folder in folders
        if folder not in done and folder not in begun and (folder / "config.json").exists()
    ]
    again = [f"{names[folder]} has no checkpoint and begins with step 1" for folder in lost]
    if not done and not begun:
        return "; ".join(["interrupted", *(again or ["no run had begun"])])
    said = [f"{len(done)} of {len(folders)} runs are done"] if done else []
    said += [f"{names[folder]} goes on after step {step}" for folder, step in begun.items()]
    return "; ".join(["interrupted; the same command with --resume continues", *said, *again])


# below this mean |coefficient − start|, a learned filter is ordinary attention in effect
_HARDLY_MOVED = 1e-3


def carry_out(console: Console, runs: list[Run], jobs: int, results: Path, write: bool) -> int:
    """Run everything, append each row as it comes, and return the number of failed runs."""
    done = {run.folder for run in runs if run.is_resumed_and_finished}
    if jobs > 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise typer.BadParameter(
            "--jobs needs a single process, but accelerate launch has started several"
        )
    messages = _Messages(console, runs, done)
    hint = resume_hint(console, runs, messages.names)
    with hint, progress_bars(console, len(runs)) as (progress, advance):
        for finished in carry_out_all(runs, jobs, progress):
            run, row, errors = finished.run, finished.row, [finished.error]
            if row is not None and write:
                errors.append(_append(results, run, row, run.folder in done))
            error = "; ".join(filter(None, errors))
            if row is None or error:
                messages.failure(run, error)
            else:
                messages.success(run, row)
            advance()
    messages.summary()
    return messages.failed


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


class _Messages:
    """Prints a line for each run that has ended.

    Args:
        console: prints.
        runs: all that are carried out.
        done: the folders of those that were finished before.
    """

    def __init__(self, console: Console, runs: list[Run], done: set[Path]) -> None:
        self.console = console
        self.count = len(runs)
        self.names = _names(runs)
        self.done = done
        self.failed = 0
        # the largest mean movement of the coefficients that hardly moved, by the name of their row
        self._at_rest: dict[str, float] = {}
        # error → the runs that failed with it
        self._failed_with: dict[str, list[str]] = {}

    def failure(self, run: Run, error: str) -> None:
        self.failed += 1
        alike = self._failed_with.setdefault(error, [])
        alike.append(self.names[run.folder])
        # wrong data makes every run fail alike: the reason is printed once
        if len(alike) == 1:
            self._print_failure(f"{alike[0]}: {error}")

    def _print_failure(self, text: str) -> None:
        # with emoji, hub:ID:CONFIGURATION loses its colons
        self.console.print(f"failed: {text}", style="red", markup=False, emoji=False)

    def success(self, run: Run, row: Row) -> None:
        before = "finished before: " if run.folder in self.done else ""
        message = f"{before}{self.names[run.folder]}: {row.metric} {row.test:.4f}"
        self.console.print(message, highlight=False, markup=False, emoji=False)
        if row.added and row.moved is not None and row.moved < _HARDLY_MOVED:
            self._at_rest[row.name] = max(row.moved, self._at_rest.get(row.name, 0.0))

    def summary(self) -> None:
        """After the last run: failures alike, filters that hardly moved, how many runs are done."""
        for first, *others in self._failed_with.values():
            if others:
                runs = "1 more run" if len(others) == 1 else f"{len(others)} more runs"
                self._print_failure(f"{runs} for the reason of {first}")
        for name, moved in self._at_rest.items():
            message = (
                f"{name}: coefficients moved by at most {moved:.1g} in the mean, so the model is "
                "plain in effect; --set filter_lr=1e-2 would give them a learning rate of their own"
            )
            self.console.print(message, style="yellow", markup=False, emoji=False)
        finished = self.count - self.failed
        shown = "; gfsa results shows the tables" if finished else ""
        self.console.print(f"{finished} of {self.count} runs done{shown}")


def _names(runs: list[Run]) -> dict[Path, str]:
    """The name of each run, with the settings that not all of them share."""
    settings = {run.folder: run.key().settings.split() for run in runs}
    shared = set.intersection(*map(set, settings.values()))
    own = {
        folder: " ".join(word for word in words if word not in shared)
        for folder, words in settings.items()
    }
    return {run.folder: f"{run} {own[run.folder]}".rstrip() for run in runs}
