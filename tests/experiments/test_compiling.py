"""Models compiled whole or by their blocks learn what they learn as they are."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import gfsa
from gfsa_experiments.engine.step import compile_blocks, compile_model, forget_compiled
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

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected, gradient = model(x), gradients()
    assert len(gradient) == len(list(model.parameters()))
    assert compile_blocks(model, backend="aot_eager") == 12
    assert (model(x) - expected).abs().max() < 1e-12
    assert 1 <= counters["stats"]["unique_graphs"] <= 2
    for found, wanted in zip(gradients(), gradient, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
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
