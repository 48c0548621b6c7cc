"""``gfsa.FilterRate`` where Trainer accepts no ready optimizer: FSDP 2, two processes on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.filter_rate import check_against_one_process, launched, one_process


@pytest.mark.slow
def test_fsdp2(tmp_path: Path) -> None:
    expected = one_process(tmp_path / "one")
    found = launched("fsdp2", tmp_path)
    check_against_one_process(found, expected)
    assert found["rates"] == expected["rates"]
