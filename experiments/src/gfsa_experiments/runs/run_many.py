"""Many runs: one after another, or several at a time in processes of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from queue import Queue

from gfsa_experiments.engine.measure import Progress
from gfsa_experiments.runs.row import Row
from gfsa_experiments.runs.run import DivergedError, Run, carry_out


@dataclass(frozen=True)
class Finished:
    """A run that has ended: with a row, with an error, or (if it diverged) with both."""

    run: Run
    row: Row | None
    error: str = ""


def carry_out_all(
    runs: Sequence[Run],
    jobs: int = 1,
    progress: Callable[[Run], Progress] | None = None,
) -> Iterator[Finished]:
    """Yield each run as it ends; the others continue if one fails.

    Args:
        runs: the runs, started in this order.
        jobs: how many run at a time; above 1 each has a process, which later runs reuse.
        progress: makes the progress callback of a run; used if ``jobs`` is 1.
    """
    if jobs == 1:
        for run in runs:
            yield attempt(run, progress(run) if progress else None)
        return
    idle: Queue[ProcessPoolExecutor] = Queue()
    for _ in range(jobs):
        idle.put(_process(jobs))
    threads = ThreadPoolExecutor(jobs)
    used: set[ProcessPoolExecutor] = set()

    def beside_others(run: Run) -> Finished:
        process = idle.get()
        used.add(process)
        try:
            return process.submit(attempt, run).result()
        except BrokenProcessPool:
            process = _process(jobs)
            return Finished(run, None, "its process was killed (out of memory?); see --resume")
        finally:
            idle.put(process)

    try:
        for future in as_completed([threads.submit(beside_others, run) for run in runs]):
            yield future.result()
    finally:
        # an interrupt ends the queued and the active runs too
        threads.shutdown(wait=False, cancel_futures=True)
        for process in used:
            for worker in list((process._processes or {}).values()):
                worker.terminate()


def _process(jobs: int) -> ProcessPoolExecutor:
    """A process of its own for one run at a time, with its share of the cores."""
    return ProcessPoolExecutor(
        1,
        # a forked process cannot use the parent's CUDA context and threads
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(max(1, (os.cpu_count() or 1) // jobs),),
    )


def _begin_worker(threads: int) -> None:
    import signal

    import torch

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
        return Finished(run, row, f"{error}" if _is_expected(error) else details)


def _is_expected(error: Exception) -> bool:
    """Whether the message says enough; of other errors the whole traceback is shown."""
    return isinstance(error, (ValueError, OSError, FloatingPointError))
