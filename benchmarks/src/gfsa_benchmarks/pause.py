"""Stops a training run while a round is timed, so that both can share one GPU for hours."""

from __future__ import annotations

import itertools
import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import psutil
import torch

# a stopped process launches nothing more; what it had launched runs on: some training steps, and
# of replayed CUDA graphs up to a thousand, which is seconds of work
SETTLE_S = 0.5
# how long it may run on, how many samples in a row show that it has ended, and how far the mean of
# a sample is above its fastest then: processes take turns, so another one doubles it
LONGEST_WAIT_S = 30.0
QUIET_SAMPLES = 5
QUIET_RATIO = 1.25
# a sample: kernels that stay ahead of their launches, together longer than several turns of 2 ms
SAMPLE_KERNELS = 128
SAMPLE_BYTES = 128 * 2**20


def check_pausable(pid: int) -> None:
    """Raise if there is no process ``pid``, or if stopping it would stop this process as well."""
    if not psutil.pid_exists(pid):
        raise ValueError(f"--pause takes the id of a process that runs, and {pid} is none")
    this = psutil.Process()
    if pid in (this.pid, *(parent.pid for parent in this.parents())):
        raise ValueError(
            f"--pause {pid} would stop this process, too: it was started by process {pid}. Start "
            "the training in a session of its own (setsid) and give the id of that"
        )


@contextmanager
def paused(pid: int | None) -> Iterator[None]:
    """Stop process ``pid`` and all that it started; they go on at the end, whatever happens here.

    ``None`` stops nothing, and neither does a process that has ended.
    """
    if pid is None:
        yield
        return
    stopped: list[psutil.Process] = []
    with _terminated_by_exception():
        try:
            while started := [each for each in _tree(pid) if each not in stopped]:
                for process in started:
                    # noted first: whatever interrupts this, the process goes on
                    stopped.append(process)
                    with suppress(psutil.NoSuchProcess):
                        process.suspend()
            if stopped:
                time.sleep(SETTLE_S)
                # a benchmark that has used no GPU needs not wait for one
                if torch.cuda.is_initialized():
                    wait_until_quiet(_times_on_gpu)
            yield
        finally:
            for process in reversed(stopped):
                with suppress(psutil.NoSuchProcess):
                    process.resume()


def wait_until_quiet(sample: Callable[[], Sequence[float]]) -> None:
    """Return once nothing else runs on the GPU; raise after :data:`LONGEST_WAIT_S`.

    Args:
        sample: gives the times of equal kernels that were launched one after another. Where
            another process takes turns, most kernels fit into a turn and take their usual time,
            and the few that wait for a turn to end raise the mean far above it.
    """
    end = time.monotonic() + LONGEST_WAIT_S
    usual, quiet = math.inf, 0
    while quiet < QUIET_SAMPLES:
        if time.monotonic() > end:
            raise RuntimeError(
                f"the GPU was not idle within {LONGEST_WAIT_S:.0f} s after --pause had stopped the "
                "training, so times taken now would be wrong; another process may run on it "
                "(nvidia-smi lists them)"
            )
        times = sample()
        usual = min(usual, statistics.median(times))
        quiet = quiet + 1 if statistics.fmean(times) <= QUIET_RATIO * usual else 0
        if not quiet:
            # the other one ends sooner if it need not take turns
            time.sleep(SETTLE_S)


def _times_on_gpu() -> list[float]:
    """Milliseconds of each of :data:`SAMPLE_KERNELS` equal kernels on the current GPU."""
    numbers = torch.zeros(SAMPLE_BYTES // 4, dtype=torch.float32, device="cuda")
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(SAMPLE_KERNELS + 1)]
    # launches get ahead of the kernels before the first one is timed
    for _ in range(8):
        numbers.add_(1.0)
    marks[0].record()
    for mark in marks[1:]:
        numbers.add_(1.0)
        mark.record()
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


def _tree(pid: int) -> list[psutil.Process]:
    """The process and its descendants, parents first: a stopped parent starts no more of them."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """Let SIGTERM raise, as Ctrl-C does: by default it ends Python without any ``finally``."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change what a signal does
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
