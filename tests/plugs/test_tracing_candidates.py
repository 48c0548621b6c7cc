"""Which modules the tracer takes for attention, and layers that compute outside of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gfsa
from gfsa.plugs.tracing.adapter import TraceError, looks_like_attention
from gfsa.plugs.tracing.candidates import refusal_by_class_name, refusal_by_code
from support.written_attention import DIM, HEADS, B, Block, N, TwoInputs, X


def test_unknown_attention_is_reported_and_left_alone_by_default():
    model = nn.Sequential(Block("matmul"), nn.TransformerEncoderLayer(DIM, HEADS))
    report = gfsa.plug(model)
    assert list(report.plugged) == ["1.self_attn"]
    assert "unknown='trace'" in report.skipped["0.attn"]
    assert "gfsa.register_adapter" in report.skipped["0.attn"]
    with pytest.raises(ValueError, match="no adapter knows WrittenAttention"):
        gfsa.plug(Block("matmul"))


def test_attention_without_a_number_of_heads():
    model = Block("matmul")
    del model.attn.num_heads
    with pytest.raises(ValueError, match="no attribute with its number of heads"):
        gfsa.plug(model, unknown="trace")


def test_what_looks_like_attention():
    model = Block("matmul")
    assert looks_like_attention(model.attn)
    assert not looks_like_attention(model)
    assert not looks_like_attention(nn.Linear(3, 3))
    wrapper = type("SelfAttentionBlock", (nn.Module,), {})()
    wrapper.num_heads, wrapper.inner = HEADS, model.attn
    assert not looks_like_attention(wrapper), "the innermost is meant"


class OutsideTorch(torch.autograd.Function):
    """A product that the tracer does not see, as that of quantised layers."""

    @staticmethod
    def forward(ctx, x, weight):
        return torch.from_numpy(x.detach().numpy() @ weight.detach().numpy().T)


class Quantised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return OutsideTorch.apply(x, self.weight)


def test_linear_layers_that_compute_outside_torch():
    model = Block("matmul").eval()
    model.attn.qkv = Quantised(DIM, 3 * DIM)
    expected = model(X)
    gfsa.plug(model, unknown="trace")
    assert torch.equal(model(X), expected)
    assert not model.attn.qkv._forward_hooks


class Extension(nn.Linear):
    """A layer none of whose operations is dispatched, as with a compiled extension."""

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return F.linear(x, self.weight, self.bias)


def test_another_tensor_in_a_layer_that_computes_outside_torch_is_another_path():
    class Chosen(TwoInputs):
        def forward(self, x, y):
            return self.attend(x, *([y] * 2 if self.way == "cross" else [x] * 2))

    module = Chosen().eval()
    module.q, module.k, module.v = (Extension(DIM, DIM) for _ in range(3))
    module.way = "unused"
    gfsa.plug(module, unknown="trace")
    y = torch.randn(B, N, DIM)
    for _ in range(2):
        module(X, y)
    module.way = "cross"
    with pytest.raises(TraceError, match="queries come from x and its keys from y"):
        module(X, y)
    assert not module.q._forward_hooks


class SpoolAttention(TwoInputs):
    """Self-attention whose name contains "pool"."""


def test_a_name_alone_does_not_make_attention_pool() -> None:
    layer = SpoolAttention()
    refusals = [refusal_by_class_name(layer)]
    layer.probe = nn.Parameter(torch.zeros(1, 1, DIM))
    refusals.append(refusal_by_class_name(layer))
    assert refusals[0] is None
    assert refusals[1] is not None


def test_a_fixed_number_of_keys_is_refused() -> None:
    layer = SpoolAttention()
    layer.pool = nn.AdaptiveAvgPool2d(7)
    assert "pool" in str(refusal_by_code(layer))
