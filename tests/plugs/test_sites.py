"""``plugs.sites``: every attention module of a model, with its filter or its refusal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gfsa
from gfsa.plugs import registry, sites
from gfsa.plugs.sites import plugged_sites
from gfsa.plugs.tracing.adapter import TracerAdapter
from support.tiny import TinyEncoder


class Unseen(nn.Module):
    """Attention that no adapter knows."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).movedim((-3, -2), (0, 2))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def decoder() -> nn.Module:
    return nn.TransformerDecoderLayer(8, 2, 8, batch_first=True)


def test_self_attention_accepts_and_cross_attention_refuses() -> None:
    found = sites(decoder())
    assert list(found) == ["self_attn", "multihead_attn"]
    assert found["self_attn"].refusal is None
    assert found["self_attn"].num_heads == 2
    assert "cross-attention" in found["multihead_attn"].refusal
    assert not any(site.is_plugged for site in found.values())


def test_plugged_sites_have_their_filter() -> None:
    model = TinyEncoder()
    gfsa.plug(model, layers=[2])
    found = sites(model)
    assert [site.is_plugged for site in found.values()] == [False, True, False]
    assert list(plugged_sites(model)) == ["blocks.1.attention"]
    site = found["blocks.1.attention"]
    assert site.filter is gfsa.filters_of(model)[site.name]
    assert site.refusal is None
    with pytest.raises(ValueError, match=r"blocks\.0\.attention has no filter"):
        found["blocks.0.attention"].filter  # noqa: B018


class Mixer(Unseen):
    """Heads and a projection, but no attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.qkv(x).cumsum(1)


class Router(nn.Module):
    """Heads and a softmax, but no name and no projection that would show what it does."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(x).softmax(-1)


class OneHead(nn.Module):
    """Attention of one head, which neither its name nor a number of heads shows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v


class Projected(nn.Module):
    """Attention of queries, keys and values that another module projects."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self.out((x @ keys.mT).softmax(-1) @ values)


class Reduced(Unseen):
    sr_ratio = 2


REFUSED = {
    Mixer: "Mixer calls neither softmax nor",
    Router: "Router has heads and a softmax, but neither its name nor its projections show",
    OneHead: "OneHead has a projection and a softmax, but neither its name nor a number of heads",
    type("ProjectedAttention", (Projected,), {}): "keys and values that were projected outside it",
    Reduced: "Reduced has sr_ratio = 2: its queries or keys are fewer than its tokens",
}


@pytest.mark.parametrize("unknown", ["refuse", "trace"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_traced_is_listed_with_its_reason(kind: type, unknown: str) -> None:
    found = sites(nn.Sequential(kind(), nn.Linear(8, 8)), unknown)
    assert list(found) == ["0"]
    assert REFUSED[kind] in found["0"].refusal
    assert "follows its softmax" not in found["0"].refusal


def test_attention_without_a_number_of_heads_is_traced_once_it_is_set() -> None:
    model = nn.Sequential(OneHead())
    x = torch.randn(3, 5, 8)
    expected = model(x)
    with pytest.raises(ValueError, match=r"module\.num_heads = <its number of heads>"):
        gfsa.plug(model, unknown="trace")
    model[0].num_heads = 1
    gfsa.plug(model, unknown="trace")
    torch.testing.assert_close(model(x), expected)
    assert model[0].gfsa.num_heads == 1


def test_an_adapter_may_state_the_number_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfOneHead(TracerAdapter):
        def num_heads(self, module: nn.Module) -> int:
            return 1

    monkeypatch.setitem(registry._registered, OneHead, OfOneHead())
    assert sites(nn.Sequential(OneHead()))["0"].refusal is None
    monkeypatch.setitem(registry._registered, OneHead, TracerAdapter())
    assert "whose num_heads returns it" in sites(nn.Sequential(OneHead()))["0"].refusal


def _attend(scores: torch.Tensor) -> torch.Tensor:
    return nn.Softmax(dim=-1)(scores)


class InFunction(Unseen):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _attend(self.qkv(x))


class InAttribute(Unseen):
    def __init__(self) -> None:
        super().__init__()
        self.attend = torch.softmax

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(self.qkv(x), -1)


class InChild(Unseen):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Softmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(self.qkv(x))


class Softened(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.softmax(-1)


class InAutogradFunction(Unseen):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Softened.apply(self.qkv(x))


@pytest.mark.parametrize("kind", [InFunction, InAttribute, InChild, InAutogradFunction])
def test_a_softmax_is_found_wherever_it_is(kind: type) -> None:
    assert sites(nn.Sequential(kind()), "trace")["0"].refusal is None


def test_only_models_have_sites() -> None:
    with pytest.raises(TypeError, match=r"expected a model \(an nn\.Module\), got Tensor"):
        sites(torch.zeros(2))
