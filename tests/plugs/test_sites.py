"""Where filters can go: attention sites, and adapters for classes of one's own."""

from __future__ import annotations

import pickle
from unittest import mock

import pytest
import torch
from torch import nn

import gfsa
from gfsa.plugs import Adapter, SwapClass, registry, sites
from gfsa.plugs.registry import _registered
from gfsa.plugs.sites import plugged_sites
from gfsa.plugs.tracing.adapter import TracerAdapter
from support.plugging import check_backbone
from support.tiny import FilteredTinyAttention, TinyAttention, TinyEncoder, UnknownAttention


def test_self_attention_accepts_and_cross_attention_refuses() -> None:
    found = sites(nn.TransformerDecoderLayer(8, 2, 8, batch_first=True))
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


class Mixer(UnknownAttention):
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


class Reduced(UnknownAttention):
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


def test_a_reason_that_many_layers_share_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"\n  0 … 47 \(48 layers\): Reduced has") as raised:
        gfsa.plug(nn.Sequential(*(Reduced() for _ in range(48))))
    assert len(str(raised.value).splitlines()) == 3


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


class InFunction(UnknownAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _attend(self.qkv(x))


class InAttribute(UnknownAttention):
    def __init__(self) -> None:
        super().__init__()
        self.attend = torch.softmax

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(self.qkv(x), -1)


class InChild(UnknownAttention):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Softmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(self.qkv(x))


class Softened(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.softmax(-1)


class InAutogradFunction(UnknownAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Softened.apply(self.qkv(x))


@pytest.mark.parametrize("kind", [InFunction, InAttribute, InChild, InAutogradFunction])
def test_a_softmax_is_found_wherever_it_is(kind: type) -> None:
    assert sites(nn.Sequential(kind()), "trace")["0"].refusal is None


def test_only_models_have_sites() -> None:
    with pytest.raises(TypeError, match=r"expected a model \(an nn\.Module\), got Tensor"):
        sites(torch.zeros(2))


@pytest.fixture(autouse=True)
def _forget():
    with mock.patch.dict(_registered):
        yield


def test_a_registered_class(tmp_path):
    gfsa.register_adapter(TinyAttention, SwapClass(FilteredTinyAttention, heads="heads"))
    x = torch.randn(2, 6, 16)

    def run(model):
        return model(x.to(next(model.parameters()).dtype))

    report = check_backbone(lambda: TinyAttention(16, 4), run, tmp_path)
    assert report.plugged == {"": 4}


def test_registered_goes_before_built_in_and_the_last_one_wins():
    class Refuses(SwapClass):
        def refusal(self, name, module):
            return "not this one"

    gfsa.register_adapter(nn.MultiheadAttention, Refuses(nn.MultiheadAttention, heads="num_heads"))
    layer = nn.TransformerEncoderLayer(16, 4)
    with pytest.raises(ValueError, match="not this one"):
        gfsa.plug(layer)
    from gfsa.adapters.torch_mha import MULTIHEAD

    gfsa.register_adapter(nn.MultiheadAttention, MULTIHEAD)
    assert gfsa.plug(layer).plugged == {"self_attn": 4}


def test_subclasses_are_served_and_those_with_another_forward_are_not():
    gfsa.register_adapter(TinyAttention, SwapClass(FilteredTinyAttention, heads="heads"))

    class Other(TinyAttention):
        def forward(self, x, mask=None):
            return x

    with pytest.raises(ValueError, match="register an adapter for it"):
        gfsa.plug(Other(16, 4))


class Scaled(TinyAttention):
    """A subclass that inherits its forward."""

    def project(self, x, mask):
        (q, k, v), keys = super().project(x, mask)
        return [2 * q, k, v], keys


class FilteredScaled(FilteredTinyAttention, Scaled):
    pass


def test_a_subclass_that_inherits_its_forward_is_told_how():
    gfsa.register_adapter(TinyAttention, SwapClass(FilteredTinyAttention, heads="heads"))
    layer, x = Scaled(16, 4), torch.randn(2, 6, 16)
    with pytest.raises(ValueError, match=r"class FilteredScaled\(FilteredTinyAttention, Scaled\)"):
        gfsa.plug(layer)
    # what the message proposes keeps what the subclass changes
    before = layer(x)
    gfsa.register_adapter(Scaled, SwapClass(FilteredScaled, heads="heads"))
    assert str(gfsa.plug(layer)).splitlines()[1].endswith("(the model): 4 heads, adapter")
    assert torch.equal(layer(x), before)


def test_heads_by_name_or_by_function():
    by_name = SwapClass(FilteredTinyAttention, heads="heads")
    by_function = SwapClass(FilteredTinyAttention, lambda module: module.heads)
    layer = TinyAttention(16, 4)
    assert by_name.num_heads(layer) == by_function.num_heads(layer) == 4
    assert pickle.loads(pickle.dumps(by_name)).num_heads(layer) == 4
    refusal = SwapClass(FilteredTinyAttention, heads="nheads").refusal("layer", layer)
    assert refusal is not None
    assert "no attribute 'nheads'" in refusal
    with pytest.raises(TypeError, match="got 'FilteredTinyAttention'"):
        SwapClass("FilteredTinyAttention", heads="heads")


@pytest.mark.parametrize(
    ("cls", "adapter", "message"),
    [
        (TinyAttention(16, 4), SwapClass(FilteredTinyAttention, "heads"), "an nn.Module class"),
        (int, SwapClass(FilteredTinyAttention, "heads"), "an nn.Module class"),
        (TinyAttention, FilteredTinyAttention, "gfsa.plugs.Adapter"),
        (torch.nn.Linear, SwapClass(FilteredTinyAttention, "heads"), "expected a subclass of it"),
    ],
)
def test_invalid_arguments_are_refused(cls, adapter, message):
    with pytest.raises(TypeError, match=message):
        gfsa.register_adapter(cls, adapter)


class ByFlag(Adapter):
    """An adapter without a class to swap to: the layer asks for its filter itself."""

    how = "by flag"

    def num_heads(self, module):
        return module.heads

    def install(self, module):
        module.filtered = True

    def remove(self, module):
        del module.filtered


class Asking(TinyAttention):
    def forward(self, x, mask=None):
        if not getattr(self, "filtered", False):
            return super().forward(x, mask)
        return FilteredTinyAttention.forward(self, x, mask)


def test_an_adapter_of_another_kind():
    gfsa.register_adapter(Asking, ByFlag())
    layer, x = Asking(16, 4), torch.randn(2, 6, 16)
    expected = layer(x)
    report = gfsa.plug(layer, filter=gfsa.Laplacian)
    assert report.how == {"": "by flag"}
    assert not torch.allclose(layer(x), expected)
    gfsa.unplug(layer)
    assert torch.equal(layer(x), expected)
