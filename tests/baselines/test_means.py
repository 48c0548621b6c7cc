"""Means of causal layers: as the dense matrix's, and in code that a GPU's compiler can write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gfsa.operators import FunctionOperator, Visibility
from gfsa_experiments.baselines.means import (
    CHUNK,
    mean_matrix,
    mean_of_visible,
    seen_by_tokens,
    sum_by_chunks,
)
from gfsa_experiments.baselines.methods import AttnScale, FeatScale


@pytest.mark.parametrize("tokens", [1, CHUNK, CHUNK + 1, 3 * CHUNK, CHUNK**2 + 5])
def test_chunks_are_the_whole(tokens: int) -> None:
    x = torch.randn(2, 1, tokens, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    expected = x.cumsum(-2)
    got = sum_by_chunks(x, torch.float64)
    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (got, expected)]
    torch.testing.assert_close(*gradients)


def test_one_compiled_code_for_many_lengths() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: mean_of_visible(Visibility(causal=True), x, x.shape[-2]),
        backend="aot_eager",
        dynamic=True,
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (300, 1000, 777):
            x = torch.randn(1, 2, tokens, 3, dtype=torch.float64)
            expected = x.cumsum(-2) / torch.arange(1, tokens + 1)[:, None]
            torch.testing.assert_close(compiled(x), expected)


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


# a method under a visibility, and what it is called with
Call = tuple[Callable[[Tensor], Tensor], Tensor]


def attnscale(visible: Visibility) -> Call:
    """Values and a stand-in for the mixed ones as a layer of GPT-2 has them, with λ per head."""
    method = AttnScale(4)
    qkv = torch.randn(2, 256, 3, 4, 64, dtype=torch.bfloat16, requires_grad=True)

    def call(qkv: Tensor) -> Tensor:
        mixed, _, v = qkv.transpose(1, 3).unbind(2)
        operator = FunctionOperator(lambda x: mixed)
        operator.visibility = lambda: visible  # type: ignore[method-assign]
        return method(operator, v)

    return call, qkv


def featscale(visible: Visibility) -> Call:
    method = FeatScale(256)
    x = torch.randn(2, 256, 256, dtype=torch.bfloat16, requires_grad=True)
    return lambda x: method(x, visible), x


@pytest.mark.parametrize("method", [attnscale, featscale])
def test_without_padding_only_tokens_are_scanned(
    method: Callable[[Visibility], Call],
) -> None:
    """How many tokens a query sees is its place: no scan of a constant."""
    call, x = method(Visibility(causal=True))
    graphs = []

    def keep(graph: torch.fx.GraphModule, examples: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(call, backend=keep, fullgraph=True)(x)
    (graph,) = graphs
    scans = [node for node in graph.graph.nodes if "cumsum" in str(node.target)]
    assert len(scans) == 2
    for scan in scans:
        shape = scan.meta["example_value"].shape
        assert shape.numel() >= x.shape[0] * 256
        assert shape[-2] <= CHUNK


def test_tokens_see_what_some_head_sees() -> None:
    pairs = torch.rand(2, 3, 5, 5) < 0.5
    together = seen_by_tokens(Visibility(pairs=pairs))
    assert together.pairs is not None
    assert torch.equal(together.pairs, pairs.any(1, keepdim=True))
    keys = pairs[:, :, 0]
    together = seen_by_tokens(Visibility(keys, causal=True))
    assert together.causal
    assert together.keys is not None
    assert torch.equal(together.keys, keys.any(1, keepdim=True))
    shared = Visibility(keys[:, :1])
    assert seen_by_tokens(shared) is shared
