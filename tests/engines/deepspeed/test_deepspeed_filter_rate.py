"""``gfsa.FilterRate`` in Trainer under DeepSpeed, with its optimizer or the one of the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.filter_rate import check_against_one_process, one_process, two_processes

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return one_process(tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("mode", ["zero2", "zero3", "zero2-config", "zero3-config"])
def test_two_processes(
    mode: str, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = two_processes(mode, tmp_path)
    check_against_one_process(found, expected)
    # DeepSpeed moves its own schedule on before Trainer asks for the rate
    late = 1 if mode.endswith("-config") else 0
    rates = torch.tensor(expected["rates"])
    torch.testing.assert_close(torch.tensor(found["rates"])[: len(rates) - late], rates[late:])
    assert found["resumed theta"] == found["theta"]
