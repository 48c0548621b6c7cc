"""The controls of pretraining, by the words of the command line: what each one really is."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

import gfsa
from gfsa_experiments.engine.step import build_optimiser
from gfsa_experiments.runs.methods import added_parameters, find_method
from gfsa_experiments.runs.sweep import Request
from gfsa_experiments.tasks.pretrain.model import ShiftedKeys
from support.tiny_pretraining import SMALL, a_batch, built, write_corpus

HEADS, DEPTH = 2, 4


@dataclass(frozen=True)
class Control:
    """A method with its settings, and what it must be."""

    words: str
    layers: tuple[int, ...] = (1, 2, 3, 4)
    learned: tuple[int, ...] = ()
    """The powers of A whose coefficients move freely, head by head."""
    per_head: int = 0
    """Learned numbers of a head."""
    fixed: tuple[float, ...] | None = None
    """The coefficients of a filter that learns nothing."""
    begins_as_plain: bool = True
    alpha: float = 0.0
    """The weight of the first layer's values."""
    fixed_by_layer: bool = False
    """Whether the first layer has no learned numbers: it is where the depth term begins."""

    @property
    def is_gated(self) -> bool:
        return "gate=true" in self.words

    @property
    def variant(self) -> dict[str, bool]:
        """How the decoder itself differs."""
        names = ("gate", "tokenwise", "shift_keys", "fast_gates")
        return {name: f"{name}=true" in self.words for name in names}


CONTROLS = {
    "plain": Control("plain", layers=()),
    "gain only": Control("gfsa learn=w1", learned=(1,), per_head=1),
    "degree 1": Control("degree1", learned=(0, 1), per_head=2),
    "GFSA": Control("gfsa", learned=(0, 1, 2), per_head=3),
    "upper half": Control("gfsa layers=upper", (3, 4), learned=(0, 1, 2), per_head=3),
    "lower half": Control("gfsa layers=lower", (1, 2), learned=(0, 1, 2), per_head=3),
    "every second": Control("gfsa layers=even", (2, 4), learned=(0, 1, 2), per_head=3),
    "twicing": Control("twicing", fixed=(0.0, 2.0, -1.0), begins_as_plain=False),
    "value residual": Control("neutreno strength=0.4", begins_as_plain=False, alpha=0.4),
    "gated heads": Control("plain gate=true", layers=()),
    "degree 1, gated": Control("degree1 gate=true", learned=(0, 1), per_head=2),
    "gated heads, fast": Control("plain gate=true fast_gates=true", layers=()),
    "token-wise": Control("plain tokenwise=true", layers=()),
    "shifted keys": Control("plain shift_keys=true", layers=()),
    "exclusive": Control("exclusive", fixed=(0.0, 1.0, 0.0), begins_as_plain=False),
    "exclusive, learned": Control("exclusive share=learned", fixed=(0.0, 1.0, 0.0), per_head=1),
    "depth": Control("depth", fixed=(0.0, 1.0, 0.0), per_head=1, fixed_by_layer=True),
    "both": Control(
        "exclusive first_values=true",
        fixed=(0.0, 1.0, 0.0),
        per_head=1,
        fixed_by_layer=True,
        begins_as_plain=False,
    ),
    "ResFormer": Control("resformer", fixed=(0.0, 1.0, 0.0), begins_as_plain=False),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data"))


def changed_model(control: Control, data: Path) -> tuple[Any, Any, int]:
    """A task, its model with the control applied, and the learned numbers that it added."""
    method, *words = control.words.split()
    (run,) = Request("pretrain", method, setting=words).runs()
    config: Any = run.config
    assert {name: getattr(config, name) for name in control.variant} == control.variant
    task = built(data, depth=DEPTH, qk_norm="temperature", **control.variant)
    find_method(run.method).apply(task.model, run.options)
    return task, task.model, sum(p.numel() for p in added_parameters(task.model))


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_is_plugged_where_it_says(name: str, data: Path) -> None:
    control = CONTROLS[name]
    plain = built(data, depth=DEPTH, qk_norm="temperature", **control.variant)
    task, model, added = changed_model(control, data)
    filters = gfsa.filters_of(model)
    assert tuple(int(place.split(".")[2]) + 1 for place in filters) == control.layers
    assert added == HEADS * control.per_head * (len(control.layers) - control.fixed_by_layer)
    count = sum(p.numel() for p in model.parameters())
    assert count - sum(p.numel() for p in plain.model.parameters()) == added
    batch = a_batch(task)
    same = torch.equal(task.loss(model, batch), plain.loss(plain.model, batch))
    assert same == control.begins_as_plain


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_computes_its_formula(name: str, data: Path) -> None:
    control = CONTROLS[name]
    task, model, _ = changed_model(control, data)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # random weights of 0.02 give maps that are nearly uniform
            parameter.mul_(8 if parameter.dim() > 1 else 1)
            if not parameter.any():
                parameter.normal_(std=0.3)
        for filter in gfsa.filters_of(model).values():
            for parameter in filter.parameters():
                parameter.add_(torch.randn_like(parameter))
    layers = [Look(layer.self_attn) for layer in model.model.layers]
    with torch.no_grad():
        task.loss(model, a_batch(task))
    for number, (found, place) in enumerate(zip(layers, model.model.layers, strict=True), start=1):
        c = coefficients(control, number, model)
        filter = getattr(place.self_attn, "gfsa", None)
        # NeuTRENO adds V⁰ behind the map
        r = None if filter is None or control.alpha else filter.depth()
        if r is not None:
            half = 2 if control.words == "resformer" else 1
            found.v = (found.v + r[:, None, None] * layers[0].v) / half
        powers = [found.v, found.a @ found.v, found.a @ (found.a @ found.v)]
        terms = [c[:, k, None, None] * power for k, power in enumerate(powers)]
        heads = torch.stack(terms).sum(0)
        if control.alpha and number > 1:
            heads = heads + control.alpha * (layers[0].v - found.v)
        if filter is not None and filter.share() is not None:
            p = (powers[1] * found.v).sum(-1, True) / found.v.square().sum(-1, True)
            heads = heads - filter.share()[:, None, None] * p * found.v
        if control.variant["tokenwise"]:
            of_v, of_map = place.self_attn.gate(found.x).transpose(1, 2)[..., None].chunk(2, 1)
            heads = heads + of_v * found.v + of_map * powers[1]
        if control.is_gated:
            gates = 2 * torch.sigmoid(place.self_attn.gate(found.x))
            heads = heads * gates.transpose(1, 2)[..., None]
        expected = place.self_attn.o_proj(heads.transpose(1, 2).flatten(2))
        torch.testing.assert_close(found.y, expected, rtol=1e-4, atol=1e-4)


def coefficients(control: Control, layer: int, model: Any) -> Tensor:
    """c0, c1, c2 of each head; a layer without a filter is A, and so is one of a baseline."""
    c = torch.tensor([[0.0, 1.0, 0.0]]).repeat(HEADS, 1)
    if layer in control.layers and not control.alpha:
        layer_attention = model.model.layers[layer - 1].self_attn
        # a gated layer has the attention inside
        attention = getattr(layer_attention, "attention", layer_attention)
        own = attention.gfsa.coefficients().detach()
        c = torch.zeros(HEADS, 3)
        c[:, : own.shape[1]] = own
        if control.fixed is None:
            free = {k for k in range(3) if len(set(c[:, k].tolist())) == HEADS}
            assert free == set(control.learned)
            assert all(not c[:, k].any() for k in set(range(3)) - free)
        else:
            assert torch.equal(c, torch.tensor(control.fixed).expand(HEADS, 3))
    return c


class Look:
    """The input, output, values and dense map of one attention layer in the next forward."""

    x: Tensor
    y: Tensor
    v: Tensor
    a: Tensor

    def __init__(self, attention: nn.Module) -> None:
        attention.register_forward_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        # a gated layer has the projections inside
        own = getattr(module, "attention", module)
        self.x, self.y = kwargs["hidden_states"], output[0]
        shape = (*self.x.shape[:-1], HEADS, own.head_dim)
        q = own.q_norm(own.q_proj(self.x).view(shape)).transpose(1, 2)
        k = own.k_norm(own.k_proj(self.x).view(shape)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *kwargs["position_embeddings"])
        self.v = own.v_proj(self.x).view(shape).transpose(1, 2)
        seen = torch.ones(q.shape[-2], q.shape[-2]).tril().bool()
        scores = (q @ k.mT * own.scaling).masked_fill(~seen, -math.inf)
        self.a = scores.softmax(-1)


def test_shifted_keys_begin_as_keys_and_add_the_one_before() -> None:
    shifted, k = ShiftedKeys(HEADS), torch.randn(1, 5, HEADS, 4)
    assert torch.equal(shifted(k), k)
    nn.init.constant_(shifted.kappa, 0.5)
    torch.testing.assert_close(shifted(k)[:, 1:], k[:, 1:] + 0.5 * k[:, :-1])
    assert torch.equal(shifted(k)[:, 0], k[:, 0])


def test_fast_gates_are_trained_as_gains(data: Path) -> None:
    _, model, _ = changed_model(CONTROLS["gated heads, fast"], data)
    config = dataclasses.replace(SMALL, gain_lr=0.1)
    groups = {g["name"]: g for g in build_optimiser(model, [], config, None).param_groups}
    gate = model.model.layers[0].self_attn.gate.weight
    assert any(p is gate for p in groups["biases"]["params"])
    assert groups["biases"]["lr"] == 0.1
    assert groups["biases"]["weight_decay"] == 0
