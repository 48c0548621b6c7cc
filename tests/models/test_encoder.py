"""The encoder of sequences, and filters in all of our models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gfsa
from gfsa_experiments.models import (
    Encoder,
    Graphormer,
    GraphormerCollator,
    GraphViT,
    GraphViTCollator,
)
from gfsa_experiments.models.attention import HadamardAttention, SelfAttention, SoftmaxAttention
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

FILTERED = ("softmax", "efficient")
LENGTHS = [9, 6, 1]


def small(attention: str, **options: object) -> Encoder:
    sizes = {"dim": 12, "depth": 2, "num_heads": 3, "ffn_dim": 16}
    model = Encoder(11, 5, 12, attention, **{**sizes, **options})
    return randomise(model).double().eval()


def sequences() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(11, (3, 9))
    return tokens, torch.arange(9) >= torch.tensor(LENGTHS)[:, None]


def softmax_map(q: Tensor, k: Tensor, head: int) -> Tensor:
    return softmax(q @ k.T / q.shape[1] ** 0.5)


def efficient_map(q: Tensor, k: Tensor, head: int) -> Tensor:
    # over the features of each query, over the tokens for each feature of the keys
    return softmax(q) @ softmax(k.T)


def reference_forward(
    model: Encoder, tokens: Tensor, coefficients: list[Tensor] | None = None
) -> Tensor:
    x = torch.cat([model.cls[None], model.tokens.weight[tokens]])
    x = x + model.positions[: len(x)]
    map_of = softmax_map if model.attention == "softmax" else efficient_map
    x = reference_blocks(model.blocks, x, map_of, coefficients)
    inner, _, outer = model.head
    hidden = (layer_norm(model.norm, x[0]) @ inner.weight.T + inner.bias).clamp(min=0)
    return hidden @ outer.weight.T + outer.bias


@torch.no_grad()
@pytest.mark.parametrize("attention", FILTERED)
def test_forward_is_the_formula_with_and_without_a_filter(attention: str) -> None:
    model, (tokens, padding) = small(attention), sequences()
    plain = model(tokens, padding)
    rows = [row[:length] for row, length in zip(tokens, LENGTHS, strict=True)]
    expected = torch.stack([reference_forward(model, row) for row in rows])
    assert expected.std() > 0.1
    torch.testing.assert_close(plain, expected, rtol=0, atol=1e-10)

    gfsa.plug(model, K=4)
    assert torch.equal(model(tokens, padding), plain)
    for filter in gfsa.filters_of(model).values():
        filter.theta.normal_()
    coefficients = [filter.coefficients() for filter in gfsa.filters_of(model).values()]
    expected = torch.stack([reference_forward(model, row, coefficients) for row in rows])
    got = model(tokens, padding)
    assert (got - plain).abs().max() > 0.1
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize(
    ("attention", "plugged"),
    [(kind, plugged) for kind in FILTERED for plugged in (False, True)],
)
def test_padding_changes_nothing(attention: str, plugged: bool) -> None:
    model, (tokens, padding) = small(attention), sequences()
    if plugged:
        gfsa.plug(model, w0=0.3, wK=-0.2)
    together = model(tokens, padding)
    for row, length, expected in zip(tokens, LENGTHS, together, strict=True):
        got = model(row[None, :length])[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    other = torch.where(padding, (tokens + 1) % 11, tokens)
    torch.testing.assert_close(model(other, padding), together, rtol=0, atol=1e-12)
    assert (model(tokens) - together)[1:].abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("plugged", [False, True])
def test_under_autocast_efficient_attention_is_the_function(plugged: bool) -> None:
    model, (_, padding) = small("efficient").float(), sequences()
    coefficients = torch.tensor([0.0, 1.0])
    if plugged:
        gfsa.plug(model, K=4, w0=0.3, wK=-0.2)
        coefficients = gfsa.filters_of(model)["blocks.0.attention"].coefficients()
    attention = model.blocks[0].attention
    x = torch.randn(3, 9, 12)
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = attention.heads(x)
        assert q.dtype == torch.bfloat16
        y = gfsa.linear_graph_filter_attention(q, k, v, coefficients, padding)
        assert torch.equal(attention(x, padding), attention.merge(y))


def test_size_of_the_benchmark_model() -> None:
    with torch.device("meta"):
        sizes = {
            attention: sum(p.numel() for p in Encoder(16, 10, 2000, attention).parameters())
            for attention in ("softmax", "efficient")
        }
    block = 4 * (512 * 512 + 512) + 2 * 512 * 1024 + 1024 + 512 + 4 * 512
    rest = 16 * 512 + 2002 * 512 + 2 * 512 + 512 * 1024 + 1024 + 1024 * 10 + 10
    assert sizes["softmax"] == sizes["efficient"] == 4 * block + rest


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="attention must be one of"):
        Encoder(11, 5, 12, "sparse")
    with pytest.raises(ValueError, match="never builds the map"):
        Encoder(11, 5, 12, "efficient", attention_dropout=0.1)
    with pytest.raises(ValueError, match="multiple of num_heads"):
        Encoder(11, 5, 12, dim=10, num_heads=3)
    with pytest.raises(ValueError, match="13 tokens is longer than max_length=12"):
        small("softmax")(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(ValueError, match="expected a bool padding of shape"):
        small("softmax")(torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, 5))


GRAPHS = [molecule(9, 3), molecule(6, 1, seed=1), molecule(4, seed=2)]


def graphormer() -> tuple[nn.Module, tuple[Any, ...]]:
    model = Graphormer((ATOMS,), (BONDS,), dim=12, depth=4, num_heads=3, ffn_dim=12)
    return model, (GraphormerCollator()(GRAPHS),)


def graph_vit() -> tuple[nn.Module, tuple[Any, ...]]:
    model = GraphViT((ATOMS,), (BONDS,), dim=12, num_heads=3, gnn_depth=1, dropout=0.2)
    return model, (GraphViTCollator(4)(GRAPHS),)


def encoder(attention: str) -> tuple[nn.Module, tuple[Any, ...]]:
    model = Encoder(11, 5, 9, attention, dim=12, num_heads=3, ffn_dim=12)
    return model, (torch.randint(11, (3, 9)), torch.arange(9) >= torch.tensor([[9], [6], [1]]))


MODELS = {
    "graphormer": graphormer,
    "graph_vit": graph_vit,
    "softmax": lambda: encoder("softmax"),
    "efficient": lambda: encoder("efficient"),
}
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
@pytest.mark.parametrize("build", [graphormer, graph_vit])
def test_a_graph_alone_is_the_graph_in_a_batch(build: Build, plugged: bool) -> None:
    model, _ = build()
    randomise(model.double()).eval()
    if plugged:
        gfsa.plug(model, w0=0.3, wK=-0.2)
    collate = GraphormerCollator() if build is graphormer else GraphViTCollator(4)
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


@pytest.mark.parametrize("kind", [SoftmaxAttention, HadamardAttention])
def test_attention_dropout_acts_where_the_filter_says(kind: type[SelfAttention]) -> None:
    attention = kind(8, 2, dropout=0.5).train()
    graph: tuple[Tensor | None, ...] = (None,)
    if kind is HadamardAttention:
        graph = (torch.zeros(1, 6, dtype=torch.bool), torch.ones(1, 6, 6))
    with torch.no_grad():
        attention.out.weight.copy_(torch.eye(8))
        attention.out.bias.zero_()
    x = torch.randn(1, 6, 8)
    v = attention.merge(attention.heads(x)[2])
    # H = I: nothing of A is in it, so dropping entries of A changes nothing …
    gfsa.plug(attention, w0=1.0, w1=0.0)
    torch.testing.assert_close(attention(x, *graph), v)
    gfsa.unplug(attention)
    # … and dropping entries of H takes some tokens away and doubles the others
    gfsa.plug(attention, w0=1.0, w1=0.0, dropout_after="filter")
    ratio = (attention(x, *graph) / v).detach()
    assert torch.all((ratio.abs() < 1e-5) | ((ratio - 2).abs() < 1e-4))
    assert 0 < int((ratio > 1).sum()) < ratio.numel()
