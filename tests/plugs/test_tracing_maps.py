"""Where a traced module returns its weights, they are the map of its filter."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import gfsa
from gfsa.plugs.tracing.adapter import TraceError
from support.plugging import disturb, matrix_polynomial
from support.written_attention import HEADS, WrittenAttention, X, traced


class Returning(WrittenAttention):
    """Attention that returns its weights, in one of many shapes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.weights = None
        y = super().forward(x)
        return y, self.weights

    def by_as_they_are(self, q, k, v):
        self.weights = (q @ k.mT).softmax(-1)
        return self.weights @ v

    def by_before_dropout(self, q, k, v):
        self.weights = (q @ k.mT).softmax(-1)
        return self.drop(self.weights) @ v

    def by_before_merging(self, q, k, v):
        self.weights = (q @ k.mT).softmax(-1)
        merged = self.weights.to(v.dtype).reshape(-1, *q.shape[2:3] * 2)
        return torch.bmm(merged, v.flatten(0, 1)).unflatten(0, (-1, HEADS))

    def by_after_merging(self, q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        attention = (q @ k.mT).softmax(-1)
        self.weights = attention.unflatten(0, (-1, HEADS))
        return (self.drop(attention) @ v).unflatten(0, (-1, HEADS))

    def by_columns(self, q, k, v):
        self.weights = (q @ k.mT).softmax(-1)
        return (v.mT @ self.weights.mT).mT

    def by_other_order_in_memory(self, q, k, v):
        weights = (q @ k.mT).softmax(-1)
        y = weights.transpose(0, 1) @ v.transpose(0, 1)
        self.weights = weights
        return y.transpose(0, 1)

    def by_mean_over_heads(self, q, k, v):
        attention = (q @ k.mT).softmax(-1)
        y = attention @ v
        self.weights = attention.mean(1)
        return y

    def by_mean_before_the_product(self, q, k, v):
        attention = (q @ k.mT).softmax(-1)
        self.weights = attention.mean(1)
        return attention.reshape(attention.shape) @ v

    def by_before_mixing(self, q, k, v):
        self.weights = (q @ k.mT).softmax(-1)
        return torch.einsum("bhij,gh->bgij", self.weights, self.mix) @ v


RETURNED = [way.removeprefix("by_") for way in vars(Returning) if way.startswith("by_")]


@pytest.mark.parametrize("way", [way for way in RETURNED if way != "before_mixing"])
@torch.no_grad()
def test_weights_that_a_module_returns_are_those_of_the_filter(way):
    module = Returning().double().eval()
    module.way = way
    x = X.double()
    plain = module(x)[1]
    gfsa.plug(module, unknown="trace")
    (coefficients,) = disturb(module)
    y, weights = module(x)
    full = copy.deepcopy(module)
    gfsa.unplug(full)
    full.way = "as_they_are"
    expected = matrix_polynomial(coefficients, full(x)[1])
    values = full.qkv(x).unflatten(-1, (3, HEADS, -1))[:, :, 2].transpose(1, 2)
    by_definition = full.proj((expected @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(y, by_definition, rtol=0, atol=1e-12)
    expected = expected.mean(1) if weights.dim() == 3 else expected
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
    assert weights.shape == plain.shape


def test_maps_are_not_built_where_they_are_not_returned(monkeypatch):
    monkeypatch.delattr(gfsa.GraphFilter, "map")
    assert traced("matmul")(X).isfinite().all()
    module = Returning()
    module.way = "as_they_are"
    gfsa.plug(module, unknown="trace")
    with pytest.raises(AttributeError, match="map"):
        module(X)


def test_weights_without_a_filtered_map_are_refused():
    module = Returning()
    module.way = "before_mixing"
    gfsa.plug(module, unknown="trace")
    with pytest.raises(TraceError, match="not the map that multiplies its values"), pytest.warns():
        module(X)
