"""A trial forward of plug: what fails on the caller's inputs is skipped, with its reason."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import gfsa
from gfsa.operators import AttentionOperator
from gfsa.plugs import SwapClass
from gfsa.plugs.registry import _registered
from support.zoo import SMALL, randomise


class Attention(nn.Module):
    """Attention that no adapter knows."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).transpose(1, 2).reshape(b, n, c)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Strided(Attention):
    """Fewer keys than queries, which only a forward shows."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, :, ::2], v[:, :, ::2])


class Bypassing(nn.Module):
    """A block that has attention and does not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attn.qkv(x)[..., :8]


class Model(nn.Module):
    """Layers, and state of every kind that a forward may change."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("expanded", torch.zeros(1).expand(3))
        self.seen: list[int] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.shape[1])
        self.last = x
        x = x + 0 * torch.rand(()) + 0 * random.random() + 0 * float(numpy.random.rand())
        for layer in self.layers:
            x = x + layer(x)
        return self.dropout(self.norm(x.transpose(1, 2)))


X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))


def generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]


def plug(model: nn.Module, **arguments: Any) -> gfsa.plugs.PlugReport:
    return gfsa.plug(model, unknown="trace", inputs=X, **arguments)


def test_what_fails_is_skipped_with_its_reason_and_the_rest_works() -> None:
    model = Model(Attention(), Strided(), Attention(), Strided())
    planned = plug(model, dry_run=True)
    report = plug(model)
    assert (planned.plugged, planned.skipped) == (report.plugged, report.skipped)
    assert list(report.plugged) == list(gfsa.filters_of(model)) == ["layers.0", "layers.2"]
    assert list(report.skipped) == ["layers.1", "layers.3"]
    for reason in report.skipped.values():
        assert "TraceError: cannot filter layers." in reason
        assert "6×3, not square" in reason
    assert report.parameters == 2 * 2 * 3
    assert "plugged 2 layers, 12 learned numbers (2 skipped)" in str(report)
    model(X).sum().backward()
    assert all(f.theta.grad is not None for f in gfsa.filters_of(model).values())


def test_without_inputs_the_first_forward_raises() -> None:
    model = Model(Attention(), Strided())
    assert len(gfsa.plug(model, unknown="trace").plugged) == 2
    with pytest.raises(RuntimeError, match="not square"):
        model(X)


def test_a_layer_that_does_not_call_its_filter_is_skipped() -> None:
    model = Model(Attention(), Bypassing())
    report = plug(model)
    assert list(report.plugged) == ["layers.0"]
    assert "ran without calling its filter" in report.skipped["layers.1.attn"]
    model.eval()(X)


def test_a_layer_that_is_not_reached_keeps_its_filter_and_is_named() -> None:
    model = Model(Attention())
    model.tower = nn.Sequential(Attention())
    report = plug(nn.Sequential(model))
    assert report.how == {
        "0.layers.0": "tracer",
        "0.tower.0": "tracer, not reached by the trial forward",
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dry_run", [True, False])
def test_the_model_and_the_generators_are_as_before(dry_run: bool, training: bool) -> None:
    model = Model(Attention(), Strided(), Bypassing()).train(training)
    model.norm.eval()
    model(X).sum().backward()
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    modes = {name: m.training for name, m in model.named_modules()}
    hooks = {name: len(m._forward_hooks) for name, m in model.named_modules()}
    last, seen = model.last, list(model.seen)
    graph = model(X).sum()
    seen.append(6)
    buffers["calls"] += 1
    last = model.last
    before = generators()
    plug(model, dry_run=dry_run)
    assert generators() == before
    assert model.last is last
    assert model.seen == seen
    now = dict(model.named_buffers())
    assert all(torch.equal(value, now[name]) for name, value in buffers.items())
    assert all(m.training == modes.get(name, training) for name, m in model.named_modules())
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    assert all(torch.equal(found[name], gradients[name]) for name in found)
    # a graph that was recorded before is still valid
    graph.backward()
    if dry_run:
        assert not gfsa.filters_of(model)
        assert {n: len(m._forward_hooks) for n, m in model.named_modules()} == hooks
    else:
        assert list(gfsa.filters_of(model)) == ["layers.0"]


@pytest.mark.parametrize(
    ("layer", "width", "message"),
    [
        (Attention, 5, "without any new filter it raised RuntimeError"),
        (Strided, 8, r"(?s)no filter works in Model.*layers\.0: the trial.*6×3"),
    ],
)
def test_a_trial_that_leaves_nothing(layer: type[nn.Module], width: int, message: str) -> None:
    model = Model(layer())
    with pytest.raises(ValueError, match=message):
        gfsa.plug(model, unknown="trace", inputs=torch.randn(2, 6, width))
    assert not gfsa.filters_of(model)
    assert model.training


def test_ctrl_c_in_the_trial_restores_the_model() -> None:
    model = Model(Attention(), Attention())
    calls = []

    def interrupt(module: nn.Module, args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    handle = model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        plug(model)
    handle.remove()
    assert not gfsa.filters_of(model)
    assert model.training
    assert not model.calls.any()
    assert type(model.layers[0]) is Attention


def test_keyword_arguments_and_layers_that_are_plugged_already() -> None:
    model = Model(Attention(), Attention(), Strided())
    gfsa.plug(model, unknown="trace", layers=[1])
    report = gfsa.plug(model, unknown="trace", layers=[2, 3], inputs={"x": X})
    assert list(report.plugged) == ["layers.1"]
    assert list(gfsa.filters_of(model)) == ["layers.0", "layers.1"]
    # the check of the first filter was not used up by the trial
    model.layers[0].forward = lambda x: x
    with pytest.raises(gfsa.plugs.FilterNotCalledError, match=r"layers\.0"):
        model.eval()(X)


def test_a_compiled_model_is_tried_uncompiled() -> None:
    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise AssertionError("the trial compiled the model")

    model = Model(Attention(), Strided())
    report = plug(torch.compile(model, backend=backend))
    assert [name.rpartition(".")[2] for name in report.plugged] == ["0"]


def test_linear_attention_of_hybrids_is_named() -> None:
    linear = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    config = transformers.Qwen3NextConfig(
        **{**SMALL, **linear, **experts, "num_hidden_layers": 4},
        num_key_value_heads=1,
        head_dim=8,
        linear_value_head_dim=8,
    )
    report = gfsa.plug(transformers.Qwen3NextModel(config), dry_run=True)
    assert list(report.plugged) == ["layers.3.self_attn"]
    assert list(report.skipped) == [f"layers.{i}.linear_attn" for i in range(3)]
    assert all("GatedDeltaNet is a delta-rule" in why for why in report.skipped.values())


def llama() -> Any:
    config = transformers.LlamaConfig(**SMALL)
    return transformers.LlamaForCausalLM(config).eval()


def test_a_cache_among_the_inputs_stays_empty() -> None:
    """Each forward fills it: the second one of the trial would read the tokens of the first."""
    model = llama()
    cache = transformers.DynamicCache(config=model.config)
    inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "past_key_values": cache}
    assert len(gfsa.plug(model, inputs=inputs).plugged) == 2
    assert cache.get_seq_length() == 0
    # a filter that does nothing is left out, and outputs do not change
    assert gfsa.prune(model, inputs=inputs).largest_change == 0
    assert cache.get_seq_length() == 0


def test_a_cache_that_was_filled_with_gradients_is_copied() -> None:
    model, ids = llama(), torch.tensor([[3, 4, 5]])
    gfsa.plug(model)
    randomise(model)
    past = model(ids).past_key_values
    assert past.layers[0].keys.grad_fn is not None
    inputs = {"input_ids": ids[:, :1], "past_key_values": past}
    expected = model(**inputs | {"past_key_values": model(ids).past_key_values}).logits
    report = gfsa.prune(model, inputs=inputs)
    assert report.largest_change == 0
    assert past.get_seq_length() == 3
    # the caller's own can still be continued, with its gradients
    found = model(**inputs).logits
    assert torch.equal(found, expected)
    found.sum().backward()


class Causal(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ForgetsCausal(Causal):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.gfsa(AttentionOperator(q, k), v)


class ForgetsTranspose(Causal):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.gfsa(AttentionOperator(q, k, is_causal=True), v).transpose(1, 2)


class Faithful(Causal):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.gfsa(AttentionOperator(q, k, is_causal=True), v)


@pytest.mark.parametrize("filter", [None, gfsa.Twicing, gfsa.Laplacian])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_computes_another_attention_is_refused(
    filter: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = X[:, :2].to(dtype)
    for filtered in (ForgetsCausal, ForgetsTranspose):
        monkeypatch.setitem(_registered, Causal, SwapClass(filtered, "num_heads"))
        model = Model(Causal(), Attention(), Causal()).to(dtype)
        report = gfsa.plug(model, unknown="trace", inputs=x, filter=filter)
        assert list(report.plugged) == ["layers.1"]
        for name in ("layers.0", "layers.2"):
            assert "its output changes by" in report.skipped[name]
            assert "is_causal" in report.skipped[name]
    monkeypatch.setitem(_registered, Causal, SwapClass(Faithful, "num_heads"))
    model = Model(Causal(), Attention(), Causal()).to(dtype)
    assert not gfsa.plug(model, unknown="trace", inputs=x, filter=filter).skipped


class Counting(Causal):
    """Attention whose tokens depend on how often it ran, and that takes what cannot be copied."""

    def forward(self, x: Tensor, lock: Any = None) -> Tensor:
        self.turns = getattr(self, "turns", 0) + 1
        return super().forward(x * self.turns)


def test_an_adapter_of_the_users_own_finds_its_state_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Resetting(Model):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                layer.turns = 0
                x = x + layer(x, lock=threading.Lock())
            return x

    class Filtered(Counting):
        attend = Faithful.attend

    monkeypatch.setitem(_registered, Counting, SwapClass(Filtered, "num_heads"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(plug(Resetting(Counting(), Counting())).plugged) == 2


def test_a_model_that_differs_from_run_to_run_is_not_judged() -> None:
    class Unsteady(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + len(self.seen))

    assert len(plug(Unsteady(Attention(), Attention())).plugged) == 2
