"""Cross-attention in adapters of the user's own, found by the trial forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gfsa
from gfsa.operators import AttentionOperator, DenseOperator, LinearOperator
from gfsa.plugs import SwapClass
from gfsa.plugs.registry import _registered


class Attention(nn.Module):
    """Self-attention, or cross-attention if it is given a context."""

    heads = 2
    attend = staticmethod(F.scaled_dot_product_attention)

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.kv = nn.Linear(8, 16)

    def project(self, x: Tensor, context: Tensor | None) -> list[Tensor]:
        k, v = self.kv(x if context is None else context).chunk(2, dim=-1)
        return [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(x), k, v)]

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y = self.attend(*self.project(x, context))
        return y.transpose(1, 2).flatten(-2)


class Filtered(Attention):
    operator: Callable[[Tensor, Tensor], Any] = AttentionOperator

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x, context)
        y: Tensor = self.gfsa(type(self).operator(q, k), v)
        return y.transpose(1, 2).flatten(-2)


class FilteredLinear(Filtered):
    operator = LinearOperator


class FilteredDense(Filtered):
    operator = DenseOperator.from_qk


class WithoutGradients(Filtered):
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        # raises if it is part of a graph
        x.numpy()
        return super().forward(x, context)


class Core(nn.Module):
    """Gets q, k and v; its weights are those of norms alone."""

    heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.norm(q), self.norm(k), v)


class FilteredCore(Core):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y: Tensor = self.gfsa(AttentionOperator(self.norm(q), self.norm(k)), v)
        return y


class Around(nn.Module):
    """Projects for a core."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.core = nn.Linear(8, 24), Core()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=-1)
        y = self.core(*(t.unflatten(-1, (2, -1)).transpose(1, 2) for t in parts))
        return y.transpose(1, 2).flatten(-2)


class Model(nn.Module):
    """Reads as many tokens as it has latents, then attends among the latents."""

    def __init__(self, given: Callable[[Tensor], tuple[Tensor, ...]] = lambda z: (z,)) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(6, 8))
        self.read, self.layer, self.given = Attention(), Attention(), given

    def forward(self, x: Tensor) -> Tensor:
        z = self.read(self.latents.expand(len(x), -1, -1), context=x)
        return z + self.layer(*self.given(z))


X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    with mock.patch.dict(_registered):
        yield


def plug(model: nn.Module, filtered: type[nn.Module] = Filtered) -> gfsa.plugs.PlugReport:
    gfsa.register_adapter(
        Core if filtered is FilteredCore else Attention, SwapClass(filtered, heads="heads")
    )
    return gfsa.plug(model, inputs=X)


@pytest.mark.parametrize("filtered", [Filtered, FilteredLinear])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_layer_that_reads_other_tokens_is_skipped(
    filtered: type[nn.Module], frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if filtered is FilteredLinear:
        linear = staticmethod(lambda q, k, v: LinearOperator(q, k).apply(v))
        monkeypatch.setattr(Attention, "attend", linear)
    model = Model().requires_grad_(not frozen)
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    report = plug(model, filtered)
    assert list(report.plugged) == ["layer"]
    assert "queries and keys are different tokens" in report.skipped["read"]
    assert {n: p.requires_grad for n, p in model.named_parameters() if n in trained} == trained
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "given",
    [
        lambda z: (z, z),
        # equal copies, as mha(norm(x), norm(x), norm(x)) has them
        lambda z: (F.layer_norm(z, (8,)), F.layer_norm(z, (8,))),
        lambda z: (z, None),
    ],
)
def test_one_tensor_in_two_arguments_is_self_attention(given: Any) -> None:
    assert list(plug(Model(given)).plugged) == ["layer"]


def test_two_norms_of_one_tensor_can_be_plugged_as_the_reason_says() -> None:
    model = Model(lambda z: (F.layer_norm(z, (8,)), 2 * F.layer_norm(z, (8,))))
    gfsa.register_adapter(Attention, SwapClass(Filtered, heads="heads"))
    with pytest.raises(ValueError, match="no filter works") as raised:
        gfsa.plug(model, inputs=X)
    assert "as two norms of one x do" in str(raised.value)
    call = "gfsa.plug(model, ..., layers=lambda name, module: name == 'layer')"
    assert f"on its own, without inputs=: {call}" in str(raised.value)
    report = gfsa.plug(model, layers=lambda name, module: name == "layer")
    assert list(report.plugged) == ["layer"]
    before = model(X)
    gfsa.filters_of(model)["layer"].theta.data.fill_(0.3)
    assert not torch.allclose(model(X), before)


def test_what_was_projected_outside_is_not_judged() -> None:
    model = nn.Sequential(Around(), Around())
    assert list(plug(model, FilteredCore).plugged) == ["0.core", "1.core"]


def test_a_layer_that_could_not_be_checked_is_named() -> None:
    with pytest.warns(UserWarning, match="read, layer attend to their own tokens was not checked"):
        report = plug(Model(), WithoutGradients)
    assert list(report.plugged) == ["read", "layer"]


def test_where_nothing_is_known_the_adapter_decides() -> None:
    model = Model()
    report = plug(model, FilteredDense)
    assert list(report.plugged) == ["read", "layer"]
    assert not report.skipped
    assert torch.is_grad_enabled()
    with torch.no_grad():
        model(X)
