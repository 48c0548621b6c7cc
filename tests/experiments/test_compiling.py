"""Models compiled whole or by their blocks learn what they learn as they are."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import gfsa
from gfsa_experiments.engine.compiling import compile_blocks, compile_model, forget_compiled
from gfsa_experiments.models.attention import Attention, Encoder
from gfsa_experiments.runs.methods import MethodConfig, find_method
from gfsa_experiments.runs.row import Row
from gfsa_experiments.runs.run import carry_out
from support.toy_recipe import toy_run

# traced and differentiated as ever; code for the CPU would take half a minute to make
COMPILE = functools.partial(torch.compile, backend="aot_eager")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    gfsa.plug(model, K=3, w0=0.1, wK=-0.2)
    return model


def test_blocks_share_their_code() -> None:
    model, x = encoder().double(), torch.randn(2, 5, 16, dtype=torch.float64)
    expected = model(x)
    assert compile_blocks(model, backend="aot_eager") == 12
    y = model(x)
    assert 1 <= counters["stats"]["unique_graphs"] <= 2
    assert (y - expected).abs().max() < 1e-12
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    forget_compiled(model)
    seen = []
    model.layers[3].linear1.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(model(x), expected)
    assert seen == [1]


def test_classes_of_torch_are_compiled_too() -> None:
    """The compiler passes over their frames, and would leave a plain model as it is in silence."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    compile_blocks(model, backend="aot_eager")
    model(torch.randn(2, 5, 16))
    assert counters["stats"]["unique_graphs"] in (1, 2)
    counters.clear()
    whole = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compile_model(whole, backend="aot_eager")
    whole(torch.randn(2, 4))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_model_without_blocks_says_so() -> None:
    with pytest.raises(ValueError, match="Linear has no such stack; use compile=model"):
        compile_blocks(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Sequential has no such stack"):
        compile_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


METHODS = ["gfsa", "featscale", "neutreno"]


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_compiled_pictures(method: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", img_size=32, patch_size=8, depth=3)
    find_method(method).apply(model, MethodConfig(form="vit"))
    same_gradients(model, torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("attention", ["softmax", "efficient", "linformer"])
def test_gradients_of_compiled_sequences(attention: Attention) -> None:
    torch.manual_seed(0)
    model = Encoder(
        vocabulary=9,
        num_classes=3,
        max_length=12,
        attention=attention,
        dim=16,
        depth=3,
        num_heads=2,
        ffn_dim=16,
        dropout=0.0,
        projected=4,
    )
    if attention != "linformer":
        gfsa.plug(model)
    same_gradients(model, torch.randint(9, (2, 12)))


def same_gradients(model: nn.Module, x: Tensor) -> None:
    """What is learned starts at zero here and there: everything is moved away from it first."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    found = []
    for compiled in (False, True):
        if compiled:
            compile_blocks(model, backend="aot_eager")
        model.zero_grad()
        model(x).square().sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        assert gradient.any(), name
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["model", "blocks"])
def test_a_compiled_run_learns_the_same(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", COMPILE)

    def row(name: str, **settings: Any) -> Row:
        return carry_out(toy_run(tmp_path / name, lens=True, **settings))

    plain = row("plain")
    assert not counters["stats"]["unique_graphs"]
    compiled = row("compiled", compile=how)
    assert counters["stats"]["unique_graphs"] >= 1
    assert compiled.test == plain.test
    assert compiled.moved == pytest.approx(plain.moved, rel=1e-4)
    assert compiled.settings == f"compile={how}"
