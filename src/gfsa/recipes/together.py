"""Many runs, one after another or side by side."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from gfsa.recipes.row import Row
from gfsa.recipes.run import Progress, Run, carry_out


@dataclass(frozen=True)
class Finished:
    """A run that is over: with a row, or with the reason why not."""

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
            yield _attempt(run, progress(run) if progress else None)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ProcessPoolExecutor(
        jobs,
        # a fork would take the parent's GPU and threads along
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(threads,),
    ) as pool:
        waiting = [pool.submit(_attempt, run) for run in runs]
        for future in as_completed(waiting):
            yield future.result()


def _begin_worker(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _attempt(run: Run, progress: Progress | None = None) -> Finished:
    try:
        return Finished(run, carry_out(run, progress))
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        details = "".join(traceback.format_exception(error))
        if run.folder.exists():
            (run.folder / "error.txt").write_text(details)
        return Finished(run, None, details if _is_ours(error) else f"{error}")


def _is_ours(error: Exception) -> bool:
    """Whether it is a fault of the program rather than of what it was given."""
    expected = (ValueError, FileNotFoundError, FileExistsError, FloatingPointError)
    return not isinstance(error, expected)
