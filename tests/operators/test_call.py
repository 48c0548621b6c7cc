"""The record of a call, and the cache of decisions about calls."""

from typing import Any

import pytest
import torch

import gfsa
from gfsa.operators import AttentionCall, DenseOperator
from gfsa.operators.call import DecisionCache

HEADS = [0, 2, 3]


@pytest.fixture
def call() -> AttentionCall:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.rand(2, 4, 5, 5) < 0.7
    return AttentionCall(q, k, mask, 0.5, True, 0.3, True, "filter")


def test_the_dense_operator_of_a_call_is_the_specification(call: AttentionCall) -> None:
    expected = DenseOperator.from_qk(call.q, call.k, call.attn_mask, True, 0.3)
    assert torch.equal(DenseOperator.from_call(call).matrix, expected.matrix)
    dropped = DenseOperator.from_call(call._replace(dropout_after="attention"))
    assert not torch.equal(dropped.matrix, expected.matrix)


def test_without_dropout_the_map_is_the_same(call: AttentionCall) -> None:
    plain = call.without_dropout()
    assert plain.dropout_p == 0.0
    changed = {"dropout_p", "dropout_after"}
    for name in set(call._fields) - changed:
        assert getattr(plain, name) is getattr(call, name)


def test_some_heads_have_their_rows_of_the_map(call: AttentionCall) -> None:
    whole = DenseOperator.from_call(call.without_dropout()).matrix
    some = call.of_heads(HEADS)
    assert some.dropout_p == 0.0
    torch.testing.assert_close(DenseOperator.from_call(some).matrix, whole[:, HEADS])


def test_a_cache_of_decisions_empties_when_full() -> None:
    cache: DecisionCache[str] = DecisionCache(capacity=2)
    for number in range(3):
        cache.remember((number,), str(number))
        assert cache[(number,)] == str(number)
    assert list(cache) == [(2,)]


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("backend", ["auto", "dense", "sdpa"])
def test_a_scale_that_is_no_number_is_refused(scale: float, backend: Any) -> None:
    """torch's attention gives finite numbers for it on a CPU."""
    q = torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match="scale must be a finite number"):
        gfsa.graph_filter_attention(q, q, q, torch.ones(2, 3), scale=scale, backend=backend)
