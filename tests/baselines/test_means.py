"""Means of causal layers: as the dense matrix's, and in code that a GPU's compiler can write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gfsa.operators import Visibility
from gfsa_experiments.baselines.visibility import (
    CHUNK,
    mean_matrix,
    mean_of_visible,
    sum_by_chunks,
)


@pytest.mark.parametrize("tokens", [1, CHUNK, CHUNK + 1, 3 * CHUNK, CHUNK**2 + 5])
def test_chunks_are_the_whole(tokens: int) -> None:
    x = torch.randn(2, 1, tokens, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    expected = x.cumsum(-2)
    got = sum_by_chunks(x, torch.float64)
    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (got, expected)]
    torch.testing.assert_close(*gradients)


def test_counts_are_integers() -> None:
    keys = torch.rand(2, 1, 1000, 1) < 0.5
    assert torch.equal(sum_by_chunks(keys, torch.int64), keys.cumsum(-2))


def padded(tokens: int) -> Tensor:
    """Padding behind, before, and everywhere: the queries before a first token see none."""
    keys = torch.ones(4, 1, tokens, dtype=torch.bool)
    keys[1, :, tokens // 2 :] = False
    keys[2, :, : tokens // 3] = False
    keys[3] = False
    return keys


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("queries", [300, 7])
@pytest.mark.parametrize("padding", [False, True], ids=["", "padded"])
def test_mean_is_the_dense_one(padding: bool, queries: int, compiled: bool) -> None:
    tokens = 300
    x = torch.randn(4, 2, tokens, 5, dtype=torch.float64)
    visible = Visibility(padded(tokens) if padding else None, causal=True)

    def mean(x: Tensor) -> Tensor:
        return mean_of_visible(visible, x, queries)

    torch._dynamo.reset()
    # the compiler's code for the CPU takes long to build, and is not what is asked here
    got = torch.compile(mean, backend="aot_eager", fullgraph=True)(x) if compiled else mean(x)
    weights = mean_matrix(visible, tokens, x)
    torch.testing.assert_close(got, (weights @ x)[..., tokens - queries :, :])
    if padding and queries == tokens:
        assert (got[2, :, : tokens // 3] == 0).all()
        assert (got[3] == 0).all()
