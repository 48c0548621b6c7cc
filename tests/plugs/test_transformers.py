"""Every transformers model of the zoo: the same model at first, the dense formula afterwards."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import gfsa
from support.zoo import LENGTH, SMALL, VOCABULARY, ZOO, Case, randomise

transformers.logging.set_verbosity_error()

EVERY = [
    pytest.param(case, implementation, id=f"{name}-{implementation}")
    for name, case in ZOO.items()
    for implementation in case.implementations
]


def output(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)[0]


@pytest.mark.parametrize(("case", "implementation"), EVERY)
def test_a_plugged_model_is_the_same_model(case: Case, implementation: str, tmp_path: Path) -> None:
    model, batch = case.model(implementation), case.batch()
    keys, config = list(model.state_dict()), model.config.to_dict()
    evaluated = output(model, batch)
    model.train()
    torch.manual_seed(5)
    trained = output(model, batch)

    report = gfsa.plug(model, K=3)

    assert len(report.plugged) == case.layers
    assert len(report.skipped) == case.skipped
    assert all("cross-attention" in reason for reason in report.skipped.values())
    # dropout included: a plugged model draws the random numbers that the model alone would
    torch.manual_seed(5)
    assert torch.equal(output(model, batch), trained)
    model.eval()
    assert torch.equal(output(model, batch), evaluated)
    assert "(gfsa): GFSA(" in repr(model)

    randomise(model)
    filtered = output(model, batch)
    assert not torch.equal(filtered, evaluated)
    gfsa.save(model, tmp_path)
    loaded = case.model(implementation)
    gfsa.load(loaded, tmp_path)
    for twin in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output(twin, batch), filtered)

    gfsa.unplug(model)
    assert torch.equal(output(model, batch), evaluated)
    assert list(model.state_dict()) == keys
    assert model.config.to_dict() == config
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def dense_attention(coefficients: dict[int, Tensor]) -> Any:
    """The formula itself as an attention function, written without anything of gfsa."""

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        for bias in (position_bias, attention_mask):
            scores = scores if bias is None else scores + bias
        if s_aux is not None:
            # an attention sink takes its share of the softmax and gives nothing
            sink = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        c = coefficients.get(id(module))
        if c is not None:
            identity = torch.eye(weights.shape[-1], dtype=weights.dtype)
            powers = [identity.expand_as(weights), weights, weights @ weights]
            weights = sum(c[:, k, None, None] * power for k, power in enumerate(powers))
        return (weights @ value).transpose(1, 2), weights

    return attention


@pytest.mark.parametrize(("case", "implementation"), EVERY)
def test_a_filter_is_the_dense_formula(
    case: Case, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = case.model(implementation), case.batch()
    gfsa.plug(model, K=4)
    randomise(model)
    filtered = output(model, batch)

    reference = case.model("eager")
    modules = dict(reference.named_modules())
    coefficients = {}
    for name, filter in gfsa.filters_of(model).items():
        module = modules[name]
        coefficients[id(module)] = filter.coefficients()
        if implementation == "sdpa":
            # what sdpa leaves out of the map, the reference leaves out as well
            module.attn_logit_softcapping = None
        namespace = inspect.unwrap(type(module).forward).__globals__
        monkeypatch.setitem(namespace, "eager_attention_forward", dense_attention(coefficients))
    expected = output(reference, batch)

    error = (filtered - expected).abs().max() / expected.abs().max()
    assert error < case.tolerance(implementation)


PADDED = [
    pytest.param(case, implementation, side, id=f"{name}-{implementation}-{side}")
    for name, case in ZOO.items()
    for implementation in case.implementations
    for side in ("left", "right")
    if case.padded and "decoder_input_ids" not in case.inputs()
    # left padding moves the positions of a model that takes no position_ids
]


@pytest.mark.parametrize(("case", "implementation", "side"), PADDED)
def test_padding_changes_nothing(case: Case, implementation: str, side: str) -> None:
    model = case.model(implementation).float()
    gfsa.plug(model, K=3)
    randomise(model)
    ids = torch.randint(3, VOCABULARY, (1, 6))
    padding = torch.zeros(1, 3, dtype=torch.long)
    ones, zeros = torch.ones(1, 6, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)
    parts = (padding, ids), (zeros, ones)
    if side == "right":
        parts = (ids, padding), (ones, zeros)
    padded = {"input_ids": torch.cat(parts[0], 1), "attention_mask": torch.cat(parts[1], 1)}
    if side == "left" and "roberta" not in model.config.model_type:
        # roberta counts positions from its first real token by itself
        padded["position_ids"] = torch.cat((torch.zeros_like(padding), torch.arange(6)[None]), 1)
    alone = output(model, {"input_ids": ids, "attention_mask": ones})
    together = output(model, padded)
    real = together[:, 3:] if side == "left" else together[:, :6]
    assert (real - alone).abs().max() < 2e-5


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_the_implementation_can_be_switched(name: str, order: str) -> None:
    case = ZOO[name]
    batch = case.batch()
    outputs = {}
    for implementation in ("eager", "sdpa"):
        model = case.model("eager" if implementation == "sdpa" else "sdpa")
        if order == "before":
            model.set_attn_implementation(implementation)
        gfsa.plug(model, K=3)
        if order == "after":
            model.set_attn_implementation(implementation)
        randomise(model)
        outputs[implementation] = output(model, batch)
        gfsa.unplug(model)
        assert model.config._attn_implementation == implementation
    difference = (outputs["eager"] - outputs["sdpa"])[batch["attention_mask"].bool()]
    assert difference.abs().max() < 1e-5


def test_any_registered_attention_is_called_once_a_pass() -> None:
    calls = []

    def counted(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any):
        calls.append((module.config._attn_implementation, module.num_key_value_groups))
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(
            module, query, key, value, mask, **kwargs
        )

    transformers.AttentionInterface.register("counted", counted)
    transformers.AttentionMaskInterface.register(
        "counted", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    )
    case = ZOO["llama"]
    batch = case.batch()
    model = case.model("sdpa")
    gfsa.plug(model, K=3)
    randomise(model)
    expected = output(model, batch)
    model.set_attn_implementation("counted")
    # the first forward also checks the function
    output(model, batch)
    calls.clear()
    assert (output(model, batch) - expected).abs().max() < 1e-6
    # two layers, two passes each; the second pass has a key for every query head
    assert calls == [("counted", 2), ("counted", 1)] * 2
    # in training every pass drops the same entries of A
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    found = []
    for implementation in ("counted", "sdpa"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(0)
        found.append(output(model, batch))
    assert (found[0] - expected).abs().max() > 1e-3
    assert (found[0] - found[1]).abs().max() < 1e-6


# its C++ takes most of a minute to compile
@pytest.mark.slow
@torch.no_grad()  # flex attention has no backward on the CPU
def test_flex_attention() -> None:
    case = ZOO["llama"]
    model = case.model("sdpa").float()
    gfsa.plug(model, K=3)
    randomise(model)
    batch = {"input_ids": torch.randint(3, VOCABULARY, (2, LENGTH))}
    expected = output(model, batch)
    model.set_attn_implementation("flex_attention")
    assert (output(model, batch) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "implementation", "compiled"),
    [
        *itertools.product(["bert", "gpt2", "vit", "llama"], ["sdpa", "eager"], [False]),
        ("gpt2", "sdpa", True),
        ("gpt2", "eager", True),
        pytest.param("bert", "sdpa", True, marks=pytest.mark.slow),
        pytest.param("vit", "sdpa", True, marks=pytest.mark.slow),
        pytest.param("llama", "sdpa", True, marks=pytest.mark.slow),
    ],
)
def test_attention_maps_are_those_of_the_filter(
    name: str, implementation: str, compiled: bool
) -> None:
    case = ZOO[name]
    reference, batch = case.model("eager"), case.batch()
    plain = reference(**batch, output_attentions=True).attentions
    model = case.model(implementation)
    # only the first layer differs: the maps of the second would move with its inputs
    gfsa.plug(model, K=4, layers=[1])
    randomise(model)
    (filter,) = gfsa.filters_of(model).values()
    run = torch.compile(model, backend="eager") if compiled else model
    maps = run(**batch, output_attentions=True).attentions
    if implementation == "eager" or not compiled:
        assert len(maps) == (len(plain) if implementation == "eager" else 1)
    identity = torch.eye(plain[0].shape[-1], dtype=plain[0].dtype)
    powers = [identity.expand_as(plain[0]), plain[0], plain[0] @ plain[0]]
    c = filter.coefficients()[..., None, None]
    expected = sum(c[:, k] * power for k, power in enumerate(powers))
    rows = slice(None) if name == "vit" else batch["attention_mask"].bool()
    assert (maps[0] - expected).transpose(1, 2)[rows].abs().max() < 1e-6


@pytest.mark.parametrize("K", [None, 3])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_gradients_flow_through_returned_maps(
    name: str, implementation: str, K: int | None
) -> None:
    case = ZOO[name]
    model, batch = case.model(implementation), case.batch()
    gfsa.plug(model, K=K)
    randomise(model)
    (expected,) = torch.autograd.grad(
        output(model, batch).sum(), [next(iter(gfsa.filters_of(model).values())).theta]
    )
    outputs = model(**batch, output_attentions=True)
    outputs.attentions[0].retain_grad()
    outputs[0].sum().backward()
    assert outputs.attentions[0].grad.abs().max() > 0
    torch.testing.assert_close(next(iter(gfsa.filters_of(model).values())).theta.grad, expected)


def test_looking_at_maps_while_training_changes_nothing() -> None:
    case = ZOO["gpt2"]
    model, batch = case.model("sdpa"), case.batch()
    gfsa.plug(model, K=3)
    randomise(model)
    model.train()
    outputs = []
    for look in (False, True):
        torch.manual_seed(5)
        outputs.append(model(**batch, output_attentions=look)[0])
    torch.testing.assert_close(*outputs)


def test_a_copy_is_a_model_of_its_own() -> None:
    case = ZOO["llama"]
    model, batch = case.model("sdpa"), case.batch()
    gfsa.plug(model, K=3)
    randomise(model)
    expected = output(model, batch)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.set_attn_implementation("eager")
        assert model.config._attn_implementation == "sdpa"
        gfsa.unplug(twin)
        assert not torch.equal(output(twin, batch), expected)
    assert torch.equal(output(model, batch), expected)


def test_a_pooling_head_has_queries_of_its_own() -> None:
    config = transformers.SiglipVisionConfig(**SMALL, image_size=16, patch_size=4)
    model = transformers.SiglipVisionModel(config).eval()
    report = gfsa.plug(model)
    assert len(report.plugged) == 2
    (reason,) = report.skipped.values()
    assert "cross-attention" in reason
    model(pixel_values=torch.randn(1, 3, 16, 16))


def test_summarised_keys_make_no_square_map() -> None:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        num_attention_heads=[2, 4],
        patch_sizes=[3, 3],
        strides=[2, 2],
        mlp_ratios=[2, 2],
    )
    model = transformers.SegformerModel(config).eval()
    report = gfsa.plug(model)
    assert len(report.plugged) == 1
    assert "not square" in next(iter(report.skipped.values()))
    model(pixel_values=torch.randn(1, 3, 32, 32))


def test_self_attention_given_other_tokens_is_an_error() -> None:
    model = ZOO["bart"].model("sdpa")
    gfsa.plug(model)
    attention = model.model.encoder.layers[0].self_attn
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match="it is given key_value_states"):
        attention(x, key_value_states=x)
    with pytest.raises(ValueError, match="it is given key_value_states"):
        attention(x, x)
    attention(x, None)


def test_dropout_after_the_filter() -> None:
    case = ZOO["bert"]
    for implementation in case.implementations:
        model, batch = case.model(implementation), case.batch()
        evaluated = output(model, batch)
        gfsa.plug(model, K=3, dropout_after="filter")
        randomise(model)
        model.train()
        torch.manual_seed(5)
        first = output(model, batch)
        torch.manual_seed(5)
        assert torch.equal(output(model, batch), first)
        assert first.isfinite().all()
        # with nothing to drop, the two places are one
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.eval()
        assert not torch.equal(output(model, batch), evaluated)
        twin = case.model(implementation)
        gfsa.plug(twin, K=3)
        randomise(twin)
        assert torch.equal(output(model, batch), output(twin, batch))


def test_reorder_and_upcast_is_refused() -> None:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=4, vocab_size=50, reorder_and_upcast_attn=True
    )
    model = transformers.GPT2LMHeadModel(config)
    with pytest.raises(ValueError, match="reorder_and_upcast_attn"):
        gfsa.plug(model)
