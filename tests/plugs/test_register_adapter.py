"""Registering an attention class: adapters of the user, precedence, and errors."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import gfsa
from gfsa.plugs import Adapter, SwapClass
from gfsa.plugs.registry import _registered
from support.plugging import check_backbone
from support.tiny import FilteredTinyAttention, TinyAttention


@pytest.fixture(autouse=True)
def _forget():
    before = dict(_registered)
    yield
    _registered.clear()
    _registered.update(before)


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
        (torch.nn.Linear, SwapClass(FilteredTinyAttention, "heads"), "must be a subclass of it"),
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
