"""DeepSpeed: ZeRO trains filters as one process does, also in Trainer; `gfsa.save` gathers them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gfsa
from engines import deepspeed_worker as worker
from engines.shared import tiny_llama, torchrun
from scale.workers.filter_rate import (
    FILTER_LR,
    MODEL_LR,
    alone_in_a_loop,
    check_against_one_process,
    launched,
    one_process,
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, worker.alone(folder)


def filters_in(folder: Path) -> dict[str, torch.Tensor]:
    model = tiny_llama()
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


def run(stage: int, folder: Path, *what: str) -> list[dict[str, Any]]:
    arguments = ("-m", "engines.deepspeed_worker", str(stage), str(folder), *what)
    torchrun(2, *arguments, CUDA_VISIBLE_DEVICES="")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_filters_are_not_loaded_into_a_partitioned_model(
    zero: tuple[int, Path, list[dict[str, Any]]],
) -> None:
    stage, _, ranks = zero
    for rank in ranks:
        refused = "load filters before fully_shard" in rank["refusal"]
        assert refused == (stage == 3), rank["refusal"]


def test_what_a_step_costs(tmp_path: Path, record_testsuite_property: Any) -> None:
    times = [rank["time"] for rank in run(3, tmp_path, "cost")]
    record_testsuite_property(
        "time",
        f"{max(times):.2f}× a step (ZeRO-3, 2 processes, 2 layers of 128 features, 2 × 256 tokens)",
    )
    assert max(times) < 3


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return one_process(tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("mode", ["zero2", "zero3", "zero2-config", "zero3-config"])
def test_two_processes(
    mode: str,
    expected: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = launched(mode, tmp_path)
    check_against_one_process(found, expected)
    # DeepSpeed moves its own schedule on before Trainer asks for the rate
    late = 1 if mode.endswith("-config") else 0
    rates = torch.tensor(expected["rates"])
    torch.testing.assert_close(torch.tensor(found["rates"])[: len(rates) - late], rates[late:])
    assert found["resumed theta"] == found["theta"]


def test_accelerate_with_an_optimizer_from_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = launched("accelerate-config", tmp_path, processes=1)
    assert found["groups"] == [["weights", MODEL_LR], ["biases", MODEL_LR], ["filters", FILTER_LR]]
    theta, expected = torch.tensor(found["theta"]), torch.tensor(alone_in_a_loop())
    assert expected.abs().max() > FILTER_LR
    torch.testing.assert_close(theta, expected, rtol=0, atol=1e-4)
