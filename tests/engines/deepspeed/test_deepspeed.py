"""DeepSpeed: ZeRO trains filters as one process does, and ``gfsa.save`` gathers them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import worker

import gfsa


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, worker.alone(folder)


def filters_in(folder: Path) -> dict[str, torch.Tensor]:
    model = worker.fresh()
    gfsa.load(model, folder)
    return {name: filter.theta.detach() for name, filter in gfsa.filters_of(model).items()}


@pytest.fixture(scope="module", params=[2, 3])
def zero(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Path, list[dict[str, Any]]]:
    """A run of two processes: its stage, its folder, and what each process saw."""
    folder = tmp_path_factory.mktemp(f"zero{request.param}")
    return request.param, folder, run(request.param, folder)


def test_zero_trains_the_filters(
    zero: tuple[int, Path, list[dict[str, Any]]],
    alone: tuple[Path, list[float]],
    record: Callable[[str, str], None],
) -> None:
    stage, folder, ranks = zero
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone[1], abs=1e-5)
        # weights with decay, norms without, filters
        assert rank["rates"] == [1e-3, 1e-3, 1e-1]
    held = [rank["held"] for rank in ranks]
    if stage == 3:
        # nothing is left of a filter between forwards, so gfsa.save has to gather it
        assert held == [[0, 0], [0, 0]]
    else:
        assert held == [[12, 12], [12, 12]]
    expected, got = filters_in(alone[0]), filters_in(folder / "filters")
    assert got.keys() == expected.keys()
    for name, theta in expected.items():
        assert theta.abs().max() > 1e-3
        torch.testing.assert_close(got[name], theta, atol=1e-5, rtol=1e-4)
    worst = max((got[name] - theta).abs().max().item() for name, theta in expected.items())
    record(
        f"ZeRO-{stage}, two processes, θ saved after four steps", f"one process's to {worst:.0e}"
    )


def run(stage: int, folder: Path, *what: str) -> list[dict[str, Any]]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        *(str(Path(__file__).with_name("worker.py")), str(stage), str(folder), *what),
    ]
    tests = str(Path(__file__).parents[2])
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_filters_are_not_loaded_into_a_partitioned_model(
    zero: tuple[int, Path, list[dict[str, Any]]],
) -> None:
    stage, _, ranks = zero
    for rank in ranks:
        refused = "load filters before fully_shard" in rank["refusal"]
        assert refused == (stage == 3), rank["refusal"]


def test_what_a_step_costs(tmp_path: Path, record: Callable[[str, str], None]) -> None:
    times = [rank["time"] for rank in run(3, tmp_path, "cost")]
    record(
        "time",
        f"{max(times):.2f}× a step (ZeRO-3, 2 processes, 2 layers of 128 features, 2 × 256 tokens)",
    )
    assert max(times) < 3
