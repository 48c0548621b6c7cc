"""``gfsa.FilterRate`` in Trainer under DeepSpeed, with its optimizer or the one of the config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.filter_rate import check_against_one_process, one_process, two_processes

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
    found = two_processes(mode, tmp_path)
    check_against_one_process(found, expected)
    # DeepSpeed moves its own schedule on before Trainer asks for the rate
    late = 1 if mode.endswith("-config") else 0
    rates = torch.tensor(expected["rates"])
    torch.testing.assert_close(torch.tensor(found["rates"])[: len(rates) - late], rates[late:])
    assert found["resumed theta"] == found["theta"]
    check = f"Trainer with gfsa.FilterRate, {LABELS[mode]}, 2 processes"
    record(check, "the run of one process, resumed exactly")
