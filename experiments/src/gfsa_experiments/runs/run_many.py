"""Many runs, one after another or side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from gfsa_experiments.runs.row import Row
from gfsa_experiments.runs.run import DivergedError, Progress, Run, carry_out


@dataclass(frozen=True)
class Finished:
    """A run that is over: with a row, with the reason why not, or (diverged) with both."""

    run: Run
    row: Row | None
    error: str = ""


def carry_out_all(
    runs: Sequence[Run],
    jobs: int = 1,
    progress: Callable[[Run], Progress] | None = None,
) -> Iterator[Finished]:
    """Each run as it ends; one that fails does not take the others along.

    Args:
        runs: what to run, the first ones first.
        jobs: how many at a time, each in a process of its own that it leaves to the next.
        progress: of one run, told as it goes on; only one at a time can be.
    """
    if jobs == 1:
        for run in runs:
            yield attempt(run, progress(run) if progress else None)
        return
    left = list(runs)
    while left:
        try:
            for finished in _in_a_pool(left, jobs):
                left.remove(finished.run)
                yield finished
        except BrokenProcessPool:
            # the system killed a worker (no memory, perhaps) and with it the pool; nobody knows
            # whose fault it was, so each of those that were running is tried alone
            lost, left = left[:jobs], left[jobs:]
            for run in lost:
                # it goes on from where it was
                yield _in_a_process(dataclasses.replace(run, resume=True))


def _in_a_pool(runs: Sequence[Run], jobs: int) -> Iterator[Finished]:
    pool = _pool(jobs)
    try:
        for future in as_completed([pool.submit(attempt, run) for run in runs]):
            yield future.result()
    except BaseException:
        # whoever interrupts wants an end, not what is in the queue
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
        raise
    pool.shutdown()


def _in_a_process(run: Run) -> Finished:
    try:
        with _pool(1) as pool:
            return pool.submit(attempt, run).result()
    except BrokenProcessPool:
        return Finished(run, None, "its process was killed (was there memory enough?)")


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        jobs,
        # a fork would take the parent's GPU and threads along
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(max(1, (os.cpu_count() or 1) // jobs),),
    )


def _begin_worker(threads: int) -> None:
    import signal

    import torch

    # the parent decides what an interrupt ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def attempt(run: Run, progress: Progress | None = None) -> Finished:
    """Carry out a run; what goes wrong is told, not raised."""
    try:
        return Finished(run, carry_out(run, progress))
    except Exception as error:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            # the other processes are in the midst of it: the launcher ends them with this one
            raise
        details = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):
            if run.folder.exists():
                (run.folder / "error.txt").write_text(details)
        row = error.row if isinstance(error, DivergedError) else None
        return Finished(run, row, details if _is_ours(error) else f"{error}")


def _is_ours(error: Exception) -> bool:
    """Whether it is a fault of the program rather than of what it was given."""
    expected = (ValueError, OSError, FloatingPointError)
    return not isinstance(error, expected)
