"""Many runs: one after another or several at a time; the row and the progress of each."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from gfsa_experiments.engine.measure import Progress
from gfsa_experiments.runs.row import Row, append_rows, read_rows
from gfsa_experiments.runs.run import DivergedError, Run, carry_out


class Finished(NamedTuple):
    """A run that has ended: with a row, with an error, or (if it diverged) with both."""

    run: Run
    row: Row | None
    error: str = ""


def carry_out_all(
    runs: Sequence[Run], jobs: int = 1, progress: Callable[[Run], Progress] | None = None
) -> Iterator[Finished]:
    """Yield each run as it ends, ``jobs`` at a time; the others continue if one fails.

    ``progress`` makes the progress callback of a run, which it has if it runs alone.
    """
    if jobs == 1:
        for run in runs:
            yield attempt(run, progress(run) if progress else None)
        return
    cores = max(1, (os.cpu_count() or 1) // jobs)
    # a forked process cannot use the parent's CUDA context and threads
    spawn = multiprocessing.get_context("spawn")
    # a pool of one process per thread: the end of a process breaks its pool alone
    threads, own, pools = ThreadPoolExecutor(jobs), threading.local(), []

    def beside_others(run: Run) -> Finished:
        if not hasattr(own, "pool"):
            own.pool = ProcessPoolExecutor(1, spawn, initializer=_begin_worker, initargs=(cores,))
            pools.append(own.pool)
        try:
            return own.pool.submit(attempt, run).result()
        except BrokenProcessPool:
            del own.pool
            return Finished(run, None, "its process was killed (out of memory?); see --resume")

    try:
        for future in as_completed([threads.submit(beside_others, run) for run in runs]):
            yield future.result()
    finally:
        # an interrupt ends the queued and the active runs too
        threads.shutdown(wait=False, cancel_futures=True)
        for pool in pools:
            for worker in list((pool._processes or {}).values()):
                worker.terminate()


def _begin_worker(threads: int) -> None:
    # the parent handles interrupts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def attempt(run: Run, progress: Progress | None = None) -> Finished:
    """Carry out a run; an error is part of what is returned, not raised."""
    try:
        return Finished(run, carry_out(run, progress))
    except Exception as error:
        diverged = isinstance(error, DivergedError)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not diverged:
            # the launcher has to end the other processes, which wait for this one; where a run
            # diverges, all of them see it
            raise
        details = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):
            if run.folder.exists():
                (run.folder / "error.txt").write_text(details, encoding="utf-8")
        row = error.row if isinstance(error, DivergedError) else None
        # the message of these says enough
        is_expected = isinstance(error, (ValueError, OSError, FloatingPointError))
        return Finished(run, row, f"{error}" if is_expected else details)


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """One line, as it is and at once, however wide the output is taken to be."""
    console.print(text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)
    console.file.flush()


# below this mean |coefficient − start|, a learned filter is ordinary attention in effect
_HARDLY_MOVED = 1e-3


def record_all(console: Console, runs: list[Run], jobs: int, results: Path, write: bool) -> int:
    """Run everything, append each row as it comes, and return the number of failed runs."""
    before = {run.folder for run in runs if run.resume and (run.folder / "row.json").exists()}
    # error → the runs that failed with it: wrong data makes every run fail alike
    failures: dict[str, list[str]] = defaultdict(list)
    at_rest: set[str] = set()
    # a line is redrawn on a terminal alone
    with console.status(f"0 of {len(runs)} runs") as status:
        progress = functools.partial(_follow, console, status)
        ended = enumerate(carry_out_all(runs, jobs, progress), start=1)
        for count, (run, row, error) in ended:
            # a sweep of settings has many runs of one method
            name = f"{run} {run.key().settings}".strip()
            if row is not None and write:
                error = "; ".join(filter(None, [error, _append(results, run, row, before)]))
            if row is None or error:
                failures[error].append(name)
                if len(failures[error]) == 1:
                    print_line(console, f"failed: {name}: {error}", style="red")
            else:
                said = "finished before: " if run.folder in before else ""
                print_line(console, f"{said}{name}: {row.metric} {row.test:.4f}")
                if row.added and row.moved is not None and row.moved < _HARDLY_MOVED:
                    at_rest.add(f"{row.method} {row.options}".strip())
            status.update(f"{count} of {len(runs)} runs")
    for first, *others in failures.values():
        if others:
            more = "1 more run" if len(others) == 1 else f"{len(others)} more runs"
            print_line(console, f"failed: {more} for the reason of {first}", style="red")
    for name in sorted(at_rest):
        message = (
            f"{name}: the coefficients moved by less than {_HARDLY_MOVED} in the mean, so the "
            "model is plain in effect: no gradient reaches them, or their learning rate is too "
            "low; --set filter_lr=1e-2 would give them one of their own"
        )
        print_line(console, message, style="yellow")
    failed = sum(map(len, failures.values()))
    shown = "; gfsa results shows the tables" if failed < len(runs) else ""
    console.print(f"{len(runs) - failed} of {len(runs)} runs done{shown}")
    return failed


def _follow(console: Console, status: Status, run: Run) -> Progress:
    """The progress callback of a run: where it is; off a terminal a line at each evaluation."""

    def update(text: str, evaluated: bool) -> None:
        status.update(escape(f"{run}: {text}"))
        if evaluated and not console.is_terminal:
            print_line(console, f"{run}: {text}")

    return update


def _append(results: Path, run: Run, row: Row, before: set[Path]) -> str:
    """Append a run's row to its table; returns why it could not be, if so."""
    table = results / f"{row.recipe}.csv"
    try:
        # of several rows of a run the latest counts; a run that was finished before usually has
        # its row in the table
        recorded = {(other.key, other.data) for other in read_rows(table)}
        if run.folder not in before or (row.key, row.data) not in recorded:
            append_rows(table, [row])
    except (ValueError, OSError) as reason:
        # the other runs continue
        return f"its row is in {run.folder / 'row.json'}, --resume adds it: {reason}"
    return ""
