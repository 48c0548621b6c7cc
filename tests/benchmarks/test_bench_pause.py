"""Training that shares the GPU stands still while times are taken, and goes on in every case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from gfsa.cli import build
from gfsa_benchmarks import pause
from gfsa_benchmarks.pause import QUIET_SAMPLES, check_pausable, paused, wait_until_quiet
from gfsa_benchmarks.timing import interleaved

# a process and one that it started, both of which do nothing for a minute
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""
# stops a process, says so, and waits to be ended; what a shell starts in the background ignores
# Ctrl-C, and so would the tests' processes
PAUSING = """
import signal, sys, time
from gfsa_benchmarks.pause import paused
signal.signal(signal.SIGINT, signal.default_int_handler)
with paused(int(sys.argv[1])):
    print("paused", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def settled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause, "SETTLE_S", 0.0)


@pytest.fixture
def training() -> Iterator[tuple[psutil.Process, psutil.Process]]:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        child = psutil.Process(int(run.stdout.readline()))
        yield psutil.Process(run.pid), child
        for process in (psutil.Process(run.pid), child):
            process.kill()


def comes_true(claim: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not (held := claim()) and time.monotonic() < end:
        time.sleep(0.01)
    return held


def stands_still(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


def bench(folder: Path, pid: int):
    arguments = ["bench", "--device", "cpu", "--shapes", "1x1x8x4", "--rounds", "1"]
    arguments += ["--csv", str(folder / "bench.csv"), "--pause", str(pid)]
    return CliRunner().invoke(build(), arguments)


def test_a_process_and_its_children_stand_still_and_go_on(training):
    with paused(training[0].pid):
        assert all(comes_true(lambda each=each: stands_still(each)) for each in training)
    assert all(comes_true(lambda each=each: not stands_still(each)) for each in training)


def test_they_go_on_after_an_error(training):
    with pytest.raises(RuntimeError, match="out of memory"), paused(training[0].pid):
        raise RuntimeError("out of memory")
    assert all(comes_true(lambda each=each: not stands_still(each)) for each in training)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_they_go_on_if_the_benchmark_is_ended(training, number):
    command = [sys.executable, "-c", PAUSING, str(training[0].pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as bench:
        assert bench.stdout is not None
        assert bench.stdout.readline() == b"paused\n"
        assert all(comes_true(lambda each=each: stands_still(each)) for each in training)
        bench.send_signal(number)
        assert bench.wait(30) != 0
    assert all(comes_true(lambda each=each: not stands_still(each)) for each in training)


def test_they_stand_still_while_times_are_taken_and_not_while_a_call_compiles(training):
    seen: list[bool] = []
    device = torch.device("cpu")
    interleaved([lambda: seen.append(stands_still(training[0]))], 2, device, pause=training[0].pid)
    assert not seen[0]
    assert len(seen) > 2
    assert all(seen[1:])


def test_a_run_that_has_ended_is_nothing_to_stop(training):
    for process in training:
        process.kill()
    assert comes_true(lambda: training[0].status() == psutil.STATUS_ZOMBIE)
    with paused(training[0].pid):
        pass
    with paused(None):
        pass


def test_a_process_that_is_not_there_is_refused_before_anything_is_measured(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(ValueError, match=f"a process that runs, and {gone.pid} is none"):
        check_pausable(gone.pid)
    shown = bench(tmp_path, gone.pid)
    assert shown.exit_code == 2
    # without frames and line breaks
    said = " ".join(shown.output.replace("│", " ").split())
    assert f"and {gone.pid} is none" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("who", ["this process", "its parent"])
def test_what_would_stop_the_benchmark_itself_is_refused(who):
    pid = os.getpid() if who == "this process" else os.getppid()
    with pytest.raises(ValueError, match="would stop this process, too"):
        check_pausable(pid)


def test_the_command_takes_a_process(training, tmp_path):
    shown = bench(tmp_path, training[0].pid)
    assert shown.exit_code == 0, shown.output
    assert list(tmp_path.iterdir())
    assert comes_true(lambda: not stands_still(training[0]))


# times of kernels: alone, beside a process that takes turns, and beside one that slows them all
ALONE = [1.0, 1.1, 0.9, 1.0] * 8
TAKING_TURNS = [1.0] * 30 + [15.0, 17.0]
SLOWED = [2.0] * 32


class Samples:
    """Gives samples one after another, the last one again and again."""

    def __init__(self, *samples: list[float]) -> None:
        self.samples = samples
        self.taken = 0

    def __call__(self) -> list[float]:
        self.taken += 1
        return self.samples[min(self.taken, len(self.samples)) - 1]


@pytest.mark.parametrize(
    "before",
    [
        [],
        [TAKING_TURNS] * 3,
        [ALONE, TAKING_TURNS, ALONE, ALONE, TAKING_TURNS],
        [ALONE, SLOWED, SLOWED],
    ],
)
def test_times_are_taken_once_nothing_else_has_run_for_several_samples(before):
    sample = Samples(*before, ALONE)
    wait_until_quiet(sample)
    assert sample.taken == len(before) + QUIET_SAMPLES


def test_a_gpu_that_stays_busy_is_an_error(monkeypatch, training):
    monkeypatch.setattr(pause, "LONGEST_WAIT_S", 0.05)
    with pytest.raises(RuntimeError, match="not idle within 0 s after --pause had stopped"):
        wait_until_quiet(Samples(TAKING_TURNS))
    monkeypatch.setattr(pause, "_times_on_gpu", Samples(TAKING_TURNS))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="not idle"), paused(training[0].pid):
        raise AssertionError("times were taken")
    assert all(comes_true(lambda each=each: not stands_still(each)) for each in training)


def test_a_benchmark_without_a_gpu_does_not_wait_for_one(monkeypatch, training):
    monkeypatch.setattr(pause, "_times_on_gpu", lambda: pytest.fail("it has asked a GPU"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with paused(training[0].pid):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_quiet_after_the_kernels_before():
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(100):
        x @ x
    start = time.monotonic()
    wait_until_quiet(pause._times_on_gpu)
    assert time.monotonic() - start < 10
