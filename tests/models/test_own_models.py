"""Filters in our blocks and in Graphormer, and in a map of the caller's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gfsa
from gfsa_experiments.models import Graphormer, GraphormerCollator
from gfsa_experiments.models.attention import SoftmaxAttention
from support.encoder import EfficientAttention, Encoder
from support.graphs import (
    ATOMS,
    BONDS,
    layer_norm,
    molecule,
    one_way,
    randomise,
    reference_blocks,
    softmax,
)

LENGTHS = [9, 6, 1]


def sequences() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(11, (3, 9))
    return tokens, torch.arange(9) >= torch.tensor(LENGTHS)[:, None]


def efficient_map(q: Tensor, k: Tensor, head: int) -> Tensor:
    # over the features of each query, over the tokens for each feature of the keys
    return softmax(q) @ softmax(k.T)


def reference_forward(
    model: Encoder, tokens: Tensor, coefficients: list[Tensor] | None = None
) -> Tensor:
    x = torch.cat([model.cls[None], model.tokens.weight[tokens]])
    x = reference_blocks(model.blocks, x, efficient_map, coefficients)
    return layer_norm(model.norm, x[0]) @ model.head.weight.T + model.head.bias


@torch.no_grad()
def test_a_map_of_the_callers_own_is_the_formula_with_and_without_a_filter() -> None:
    model, (tokens, padding) = randomise(Encoder(11, EfficientAttention)), sequences()
    model.double().eval()
    plain = model(tokens, padding)
    rows = [row[:length] for row, length in zip(tokens, LENGTHS, strict=True)]
    expected = torch.stack([reference_forward(model, row) for row in rows])
    assert expected.std() > 0.1
    torch.testing.assert_close(plain, expected, rtol=0, atol=1e-10)

    gfsa.plug(model, K=4)
    assert torch.equal(model(tokens, padding), plain)
    perturb(model)
    coefficients = [filter.coefficients() for filter in gfsa.filters_of(model).values()]
    expected = torch.stack([reference_forward(model, row, coefficients) for row in rows])
    got = model(tokens, padding)
    assert (got - plain).abs().max() > 0.1
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("plugged", [False, True])
def test_under_autocast_efficient_attention_is_the_function(plugged: bool) -> None:
    attention, coefficients = EfficientAttention(12, 3), torch.tensor([0.0, 1.0])
    if plugged:
        gfsa.plug(attention, K=4, w0=0.3, wK=-0.2)
        coefficients = gfsa.filters_of(attention)[""].coefficients()
    x, (_, padding) = torch.randn(3, 9, 12), sequences()
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = attention.heads(x)
        assert q.dtype == torch.bfloat16
        y = gfsa.linear_graph_filter_attention(q, k, v, coefficients, padding)
        assert torch.equal(attention(x, padding), attention.merge(y))


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of num_heads"):
        SoftmaxAttention(10, 3)


GRAPHS = [molecule(9, 3), molecule(6, 1, seed=1), molecule(4, seed=2)]


def graphormer() -> tuple[nn.Module, tuple[Any, ...]]:
    model = Graphormer((ATOMS,), (BONDS,), dim=12, depth=4, num_heads=3, ffn_dim=12)
    return model, (GraphormerCollator()(GRAPHS),)


def own_map() -> tuple[nn.Module, tuple[Any, ...]]:
    return Encoder(11, EfficientAttention, depth=4, dropout=0.2), sequences()


MODELS = {"graphormer": graphormer, "own map": own_map}
Build = Callable[[], tuple[nn.Module, tuple[Any, ...]]]
every_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


def perturb(model: nn.Module) -> None:
    with torch.no_grad():
        for filter in gfsa.filters_of(model).values():
            filter.theta.normal_()


@every_model
def test_plug_changes_nothing_and_unplug_restores(build: Build) -> None:
    model, inputs = build()
    randomise(model).eval()
    before, keys, classes = model(*inputs), list(model.state_dict()), [*map(type, model.modules())]
    report = gfsa.plug(model)
    assert report.plugged == {f"blocks.{number}.attention": 3 for number in range(4)}
    assert report.skipped == {}
    assert report.parameters == 4 * 3 * 3
    assert torch.equal(model(*inputs), before)
    perturb(model)
    assert not torch.allclose(model(*inputs), before, atol=1e-3)
    gfsa.unplug(model)
    assert torch.equal(model(*inputs), before)
    assert list(model.state_dict()) == keys
    assert [*map(type, model.modules())] == classes


@every_model
def test_gradients_reach_every_parameter(build: Build) -> None:
    model, inputs = build()
    randomise(model).eval()
    gfsa.plug(model)
    model(*inputs).pow(2).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@every_model
@torch.no_grad()
def test_bfloat16_and_autocast_stay_close(build: Build) -> None:
    model, inputs = build()
    randomise(model, 0.1).eval()
    gfsa.plug(model, w0=0.2, wK=0.1)
    exact = model(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(*inputs).float() - exact).abs().max() < 0.05 * exact.abs().max()
    rough = model.to(torch.bfloat16)(*inputs)
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).abs().max() < 0.05 * exact.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("plugged", [False, True])
def test_a_graph_alone_is_the_graph_in_a_batch(plugged: bool) -> None:
    model, _ = graphormer()
    randomise(model.double()).eval()
    if plugged:
        gfsa.plug(model, w0=0.3, wK=-0.2)
    collate = GraphormerCollator()
    graphs = [*GRAPHS, molecule(1), molecule(8, connected=False), one_way(molecule(7, 2))]
    alone = torch.cat([model(collate([graph])) for graph in graphs])
    torch.testing.assert_close(model(collate(graphs)), alone, rtol=1e-12, atol=1e-12)


@every_model
def test_dropout_draws_the_same_numbers_with_a_filter_and_without(build: Build) -> None:
    model, inputs = build()
    randomise(model).train()
    twin = copy.deepcopy(model)
    gfsa.plug(twin)
    torch.manual_seed(7)
    plain = model(*inputs)
    torch.manual_seed(7)
    assert torch.equal(twin(*inputs), plain)
    torch.manual_seed(8)
    assert not torch.equal(twin(*inputs), plain)


@every_model
def test_compiles_in_one_graph(build: Build) -> None:
    model, inputs = build()
    model.blocks = model.blocks[:1]
    gfsa.plug(model.eval())
    perturb(model)
    expected = model(*inputs)
    # the graph is what is asked about; what a backend makes of it is torch's business
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs), expected)


def test_attention_dropout_acts_where_the_filter_says() -> None:
    attention = SoftmaxAttention(8, 2, dropout=0.5).train()
    with torch.no_grad():
        attention.out.weight.copy_(torch.eye(8))
        attention.out.bias.zero_()
    x = torch.randn(1, 6, 8)
    v = attention.merge(attention.heads(x)[2])
    # H = I: nothing of A is in it, so dropping entries of A changes nothing …
    gfsa.plug(attention, w0=1.0, w1=0.0)
    torch.testing.assert_close(attention(x), v)
    gfsa.unplug(attention)
    # … and dropping entries of H takes some tokens away and doubles the others
    gfsa.plug(attention, w0=1.0, w1=0.0, dropout_after="filter")
    ratio = (attention(x) / v).detach()
    assert torch.all((ratio.abs() < 1e-5) | ((ratio - 2).abs() < 1e-4))
    assert 0 < int((ratio > 1).sum()) < ratio.numel()
