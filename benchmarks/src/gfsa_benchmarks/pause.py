"""Stops a training run while a round is timed, so that both can share one GPU for hours."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

# a stopped process launches nothing more; what it had launched runs on: some training steps
SETTLE_S = 0.5


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
            yield
        finally:
            for process in reversed(stopped):
                with suppress(psutil.NoSuchProcess):
                    process.resume()


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
