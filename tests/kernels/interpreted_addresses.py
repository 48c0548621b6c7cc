"""The kernels of any length on a GPU without a copy engine: by addresses instead of descriptors.

Not collected by itself: ``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

import pytest
import torch

from gfsa.kernels import launching
from support.fused_cases import NAMES, Problem, run

assert support.triton_interpreter


@pytest.mark.parametrize(
    "problem",
    [
        Problem(1, 2, 70, 24, is_causal=True, projected=True),
        Problem(2, 2, 40, 16, mask="keys", key_heads=1),
    ],
    ids=str,
)
def test_the_same_bits(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    expected, _ = run(problem)
    monkeypatch.setattr(launching, "has_copy_engine", lambda x: False)
    torch.manual_seed(0)
    for name, x, y in zip(NAMES, run(problem)[0], expected, strict=True):
        assert torch.equal(x, y), name
