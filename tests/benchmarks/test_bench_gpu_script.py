"""``benchmarks/gpu.sh train`` with programs in place of gfsa and the GPU's own."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"


@pytest.fixture
def script(tmp_path, monkeypatch):
    programs = tmp_path / "bin"
    programs.mkdir()
    note_call = f'echo "$@" "$CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/calls'
    for name, text in {
        "gfsa": f'{note_call}; [ -z "$WAIT" ] || sleep 60',
        "nvidia-cuda-mps-control": f'echo "$CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/mps',
    }.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "one.txt").touch()
    (tmp_path / "two.txt").touch()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("RESULTS", str(tmp_path / "rows"))

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(SCRIPT), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    return call


def lines_of(file: Path, count: int) -> list[str]:
    """The lines of a file that another process writes, once there are so many."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if file.exists() and len(lines := file.read_text().splitlines()) >= count:
            return lines
        time.sleep(0.02)
    raise AssertionError(f"{file.name} does not have {count} lines")


def test_plans_are_trained_one_after_another_in_the_background(script, tmp_path):
    started = script("train", tmp_path / "one.txt", tmp_path / "two.txt")
    assert started.returncode == 0, started.stderr
    first, second = lines_of(tmp_path / "calls", 2)
    rest = f"--missing --jobs 6 --results {tmp_path}/rows --out {tmp_path}/runs {tmp_path}/runs/mps"
    assert first == f"train --plan {tmp_path}/one.txt {rest}"
    assert second == f"train --plan {tmp_path}/two.txt {rest}"
    assert lines_of(tmp_path / "mps", 1) == [f"{tmp_path}/runs/mps"]


def test_a_second_start_is_refused_while_the_first_trains(script, tmp_path, monkeypatch):
    monkeypatch.setenv("WAIT", "yes")
    assert script("train", tmp_path / "one.txt").returncode == 0
    lines_of(tmp_path / "calls", 1)
    pid = int((tmp_path / "runs" / "pid").read_text())
    try:
        # the id is that of the whole: what `gfsa bench --pause` stops
        assert os.getsid(pid) == pid
        again = script("train", tmp_path / "two.txt")
        assert again.returncode == 2
        assert f"process {pid} trains already" in again.stderr
    finally:
        os.killpg(pid, 9)


@pytest.mark.parametrize("trains", [True, False])
def test_targets_pause_a_training_that_has_not_ended(script, tmp_path, monkeypatch, trains):
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/usr/bin/env bash\necho "$@" >> {tmp_path}/timed\n')
    python.chmod(0o755)
    monkeypatch.setenv("LOGS", str(tmp_path))
    training = subprocess.Popen(["sleep", "60"])
    try:
        if not trains:
            training.kill()
            training.wait()
        ended = script("targets", "--pause", training.pid, "--no-append")
    finally:
        training.kill()
        training.wait()
    assert ended.returncode == 0, ended.stderr
    calls = (tmp_path / "timed").read_text().splitlines()
    assert len(calls) >= 6
    for call in calls:
        assert (f"--pause {training.pid} --suite" in call) is trains
        assert call.endswith("--no-append")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train"], "train PLAN"),
        (["train", "no-such-plan.txt"], "no plan is called no-such-plan.txt"),
        (["trian"], "got 'trian'"),
        ([], "got ''"),
    ],
)
def test_wrong_arguments_start_nothing(script, tmp_path, arguments, said):
    refused = script(*arguments)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert not (tmp_path / "runs").exists()
