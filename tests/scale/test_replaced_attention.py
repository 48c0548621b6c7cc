"""Where torch's attention is replaced, as by context parallelism, it computes every pass."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import gfsa
from gfsa.functional import which_backend
from gfsa.operators import call

Q, K, V = torch.randn(3, 1, 4, 6, 8).unbind()
COEFFS = torch.randn(4, 3)


@pytest.fixture
def elsewhere() -> Iterator[list[int]]:
    """Counts the calls that go to the function in torch's place."""
    calls, real = [0], F.scaled_dot_product_attention

    def replaced(*args: Any, **kwargs: Any) -> Tensor:
        calls[0] += 1
        return real(*args, **kwargs)

    with mock.patch.object(F, "scaled_dot_product_attention", replaced):
        yield calls


def test_every_pass_goes_there(elsewhere: list[int]) -> None:
    y = gfsa.graph_filter_attention(Q, K, V, COEFFS)
    assert elsewhere == [2]
    assert torch.isfinite(y).all()


def test_it_says_so(elsewhere: list[int]) -> None:
    found = which_backend(Q, K, V, COEFFS)
    assert found.backend == "sdpa"
    assert "replaced" in found.reason


def test_it_is_noticed_by_whoever_imports_gfsa_afterwards(elsewhere: list[int]) -> None:
    spec = importlib.util.spec_from_file_location("call_again", call.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {spec.name: again}):
        spec.loader.exec_module(again)
    assert "replaced" in again.AttentionCall(Q, K).reason_for_torch_alone()


@pytest.mark.parametrize("backend", ["dense", "fused"])
def test_others_are_refused(backend: Any, elsewhere: list[int]) -> None:
    with pytest.raises(ValueError, match="torch's attention is replaced"):
        gfsa.graph_filter_attention(Q, K, V, COEFFS, backend=backend)


def test_dropout_of_the_filter_needs_the_whole_map(elsewhere: list[int]) -> None:
    from gfsa.operators import AttentionOperator

    operator = AttentionOperator(Q, K, dropout_p=0.1, dropout_after="filter")
    with pytest.raises(ValueError, match="and sdpa cannot serve it"):
        operator.polynomial(COEFFS, V)
