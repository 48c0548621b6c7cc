"""``gfsa.FilterRate`` in Trainer under DeepSpeed, with its optimizer or the one of the config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scale.workers.filter_rate import FILTER_LR, MODEL_LR, alone_in_a_loop
from support.filter_rate import check_against_one_process, launched, one_process

LABELS = {
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "zero2-config": "ZeRO-2, optimizer from the config",
    "zero3-config": "ZeRO-3, optimizer from the config",
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return one_process(tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("mode", list(LABELS))
def test_two_processes(
    mode: str,
    expected: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record: Callable[[str, str], None],
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
    check = f"Trainer with gfsa.FilterRate, {LABELS[mode]}, 2 processes"
    record(check, "the run of one process, resumed exactly")


def test_accelerate_with_an_optimizer_from_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Callable[[str, str], None]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = launched("accelerate-config", tmp_path, processes=1)
    assert found["groups"] == [["weights", MODEL_LR], ["biases", MODEL_LR], ["filters", FILTER_LR]]
    theta, expected = torch.tensor(found["theta"]), torch.tensor(alone_in_a_loop())
    assert expected.abs().max() > FILTER_LR
    torch.testing.assert_close(theta, expected, rtol=0, atol=1e-4)
    record(
        "accelerate, ZeRO-3, DummyOptim(gfsa.parameter_groups(…))",
        "the groups and the run of torch alone",
    )
