"""Plugging gfsa.models: plug, unplug, save, copy, compile, dropout."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
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
from support.graphs import ATOMS, BONDS, molecule, randomise

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
def test_even_layers(build: Build) -> None:
    model, _ = build()
    assert list(gfsa.plug(model, layers="even").plugged) == [
        "blocks.1.attention",
        "blocks.3.attention",
    ]


@every_model
def test_saved_and_loaded(build: Build, tmp_path: Path) -> None:
    model, inputs = build()
    model.eval()
    twin = copy.deepcopy(model)
    gfsa.plug(model, K=4)
    perturb(model)
    gfsa.save(model, tmp_path)
    gfsa.load(twin, tmp_path)
    assert torch.equal(twin(*inputs), model(*inputs))


@every_model
def test_copied_and_pickled(build: Build) -> None:
    model, inputs = build()
    gfsa.plug(model.eval())
    perturb(model)
    expected = model(*inputs)
    assert torch.equal(copy.deepcopy(model)(*inputs), expected)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    assert torch.equal(torch.load(stored, weights_only=False)(*inputs), expected)


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


def test_importing_the_library_does_not_import_the_models() -> None:
    code = (
        "import sys, gfsa, torch\n"
        "gfsa.plug(torch.nn.TransformerEncoderLayer(8, 2))\n"
        "loaded = [m for m in sys.modules if m.startswith('gfsa_experiments')]\n"
        "assert not loaded, loaded\n"
        "assert gfsa.models.Encoder.__name__ == 'Encoder'\n"
        "assert 'torch_geometric' not in sys.modules and 'pymetis' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        gfsa.models.Nothing  # noqa: B018
