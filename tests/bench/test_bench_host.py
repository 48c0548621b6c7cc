"""The host's part of a call, measured with nothing launched."""

import pytest
import torch

pytest.importorskip("triton")

from gfsa.bench import host
from gfsa.functional import which_backend


def test_everything_but_the_kernels_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "REPEATS", 2)
    monkeypatch.setattr(host, "ROUNDS", 1)
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    q = torch.zeros(1, 12, 40, 64, dtype=torch.bfloat16)
    with host.nothing_launched():
        assert which_backend(q, q, q, torch.ones(3)).backend == "fused"
        found = [host.calls(40, False), host.calls(40, False, mask), host.calls(300, True)]
    assert which_backend(q, q, q, torch.ones(3)).backend == "sdpa"
    assert all(time > 0 for times in found for time in times.values())
