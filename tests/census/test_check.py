"""The census finds what is wrong: it is shown models and filters with known faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from census.catalogue import Entry, entries
from census.check import examine
from census.reference import DenseReference, Layout, Observer, layout_of
from census.tokens import TokenProbe
from gfsa.filters import GraphFilter
from gfsa.operators.operator import value_of
from gfsa.plugs.tracing.capture import HeadLayout


@pytest.fixture(scope="module")
def catalogue() -> dict[str, Entry]:
    return {entry.name: entry for entry in entries()}


def _flip_heads(coefficients: Tensor) -> Tensor:
    return coefficients.flip(0)


def _one_sign(coefficients: Tensor) -> Tensor:
    return coefficients * torch.tensor([1.0, 1.0, -1.0], dtype=coefficients.dtype)


def _no_gradient(coefficients: Tensor) -> Tensor:
    return coefficients.detach()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_flip_heads, "off by"),
        (_one_sign, "off by"),
        (_no_gradient, "gradient of"),
    ],
)
def test_faulty_filters_are_found(
    catalogue: dict[str, Entry],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Tensor], Tensor],
    words: str,
) -> None:
    def forward(self: GraphFilter, operator: Any, v: Tensor) -> Tensor:
        return operator.polynomial(fault(value_of(self.polynomial_coefficients())), v)

    monkeypatch.setattr(GraphFilter, "forward", forward)
    finding = examine(catalogue["transformers:gpt2"]).findings["default"]
    assert finding.status == "wrong"
    assert words in finding.reason


def test_a_tracer_that_mixes_up_heads_is_found(
    catalogue: dict[str, Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    split, join = HeadLayout.split, HeadLayout.join

    def rolled(self: HeadLayout, x: Tensor, heads: int) -> Tensor:
        return split(self, x, heads).roll(1, -3)

    def rolled_back(self: HeadLayout, y: Tensor, *others: Any) -> Tensor:
        return join(self, y.roll(-1, -3), *others)

    monkeypatch.setattr(HeadLayout, "split", rolled)
    monkeypatch.setattr(HeadLayout, "join", rolled_back)
    assert examine(catalogue["timm:swin_transformer_v2"]).findings["default"].status == "wrong"


class _Attention(nn.Module):
    """Heads in the places that a layout asks for, queries and keys as told."""

    num_heads = 4

    def __init__(self, merged: str = "", order: Tensor | None = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.merged = merged
        self.order = order

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        samples, length, _ = x.shape
        q, k, v = self.qkv(x).view(samples, length, 3, 4, 2).permute(2, 0, 3, 1, 4)
        if context is not None:
            k = self.qkv(context).view(samples, length, 3, 4, 2).permute(2, 0, 3, 1, 4)[1]
        if self.order is not None:
            q = q[:, :, self.order]
        if self.merged == "heads first":
            q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))
        elif self.merged:
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        if self.merged == "heads first":
            y = y.unflatten(0, (4, samples)).transpose(0, 1)
        elif self.merged:
            y = y.unflatten(0, (samples, 4))
        return y.transpose(1, 2).flatten(-2)


class _Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = _Attention(**options)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.attention(x, context)


def _maps(model: nn.Module, x: Tensor) -> Tensor:
    observer = Observer(model)
    with torch.no_grad(), observer.running():
        model(x)
    return observer.seen["attention"].maps[0]


@pytest.mark.parametrize(
    ("merged", "layout"),
    [
        ("", Layout(-3)),
        ("samples first", Layout(None, samples_first=True)),
        ("heads first", Layout(None, samples_first=False)),
    ],
)
def test_layouts_and_the_reference_itself(merged: str, layout: Layout) -> None:
    """Whatever the layout, the reference is the formula written out for each head."""
    model = _Model(merged=merged).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    other = x.clone()
    other[0] = torch.randn(5, 8)
    corner = x.clone()
    corner[:, 0] = torch.randn(8)
    found = layout_of(_maps(model, x), _maps(model, other), _maps(model, corner), 4, 3)
    assert found == layout
    theta = torch.randn(4, 3, dtype=torch.float64)
    reference = DenseReference(model, {"attention": theta}, {"attention": found})
    with torch.no_grad(), reference.running():
        got = model(x)
    q, k, v = model.attention.qkv(x).view(3, 5, 3, 4, 2).permute(2, 0, 3, 1, 4)
    for sample in range(3):
        for head in range(4):
            a = (q[sample, head] @ k[sample, head].T).softmax(-1)
            w0, change, wK = theta[head]
            h = w0 * torch.eye(5, dtype=a.dtype) + (1 + change - wK) * a + 2 * wK * (a @ a)
            expected = h @ v[sample, head]
            assert (got[sample, :, 2 * head : 2 * head + 2] - expected).abs().max() < 1e-13


@pytest.mark.parametrize(
    ("options", "crosses", "words"),
    [
        ({}, False, None),
        ({}, True, "cross-attention"),
        ({"order": torch.tensor([1, 2, 3, 4, 5, 6, 0])}, False, "different orders"),
        ({"merged": "heads first"}, False, None),
    ],
)
def test_maps_without_powers_are_found(
    options: dict[str, Any], crosses: bool, words: str | None
) -> None:
    model = _Model(**options).double()
    x, y = torch.randn(2, 2, 7, 8, dtype=torch.float64)
    probe = TokenProbe(model, {"attention"})
    with probe.running():
        model(x, y if crosses else None)
    if words is None:
        assert not probe.found
    else:
        assert words in probe.found["attention"]
