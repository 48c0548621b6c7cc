"""transformers models that compute attention outside the interface are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import gfsa

hf.logging.set_verbosity_error()

TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def deberta() -> nn.Module:
    return hf.DebertaV2Model(
        hf.DebertaV2Config(
            **TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
        )
    )


def gpt_neo() -> nn.Module:
    config = hf.GPTNeoConfig(
        vocab_size=61,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=64,
    )
    return hf.GPTNeoForCausalLM(config)


def swin_v2() -> nn.Module:
    config = hf.Swinv2Config(
        image_size=16, patch_size=2, embed_dim=16, depths=[2], num_heads=[4], window_size=4
    )
    return hf.Swinv2Model(config)


def xlnet() -> nn.Module:
    return hf.XLNetModel(hf.XLNetConfig(vocab_size=61, d_model=32, n_layer=2, n_head=4, d_inner=48))


def mpnet() -> nn.Module:
    return hf.MPNetModel(hf.MPNetConfig(**TEXT))


def falcon() -> nn.Module:
    return hf.FalconForCausalLM(
        hf.FalconConfig(
            vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False
        )
    )


def scale_rows(linear: nn.Linear, scales: Tensor) -> None:
    """Multiply a value projection head by head."""
    rows = scales.repeat_interleave(linear.weight.shape[0] // len(scales))
    linear.weight.data.mul_(rows[:, None])
    if linear.bias is not None:
        linear.bias.data.mul_(rows)


def scale_xlnet(attention: Any, scales: Tensor) -> None:
    attention.v.data.mul_(scales[None, :, None])


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], None] | None]] = {
    "deberta_v2": (deberta, lambda attention, s: scale_rows(attention.value_proj, s)),
    "gpt_neo": (gpt_neo, lambda attention, s: scale_rows(attention.v_proj, s)),
    "swin_v2": (swin_v2, lambda attention, s: scale_rows(attention.value, s)),
    "xlnet": (xlnet, scale_xlnet),
    "mpnet": (mpnet, lambda attention, s: scale_rows(attention.v, s)),
    # one head of values for all queries: there is no projection to scale head by head
    "falcon": (falcon, None),
}


def built(name: str) -> Any:
    torch.manual_seed(0)
    return CASES[name][0]().double().eval()


def output(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, hf.Swinv2Model):
        pixels = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)
        return model(pixel_values=pixels)[0]
    return model(input_ids=torch.randint(3, 61, (2, 10), generator=generator))[0]


@pytest.mark.parametrize("name", CASES)
def test_the_same_model_at_first_and_after_unplug(name: str) -> None:
    model = built(name)
    keys, expected = list(model.state_dict()), output(model)
    report = gfsa.plug(model, K=3)
    assert set(report.how.values()) == {"tracer"}
    assert len(report.plugged) == 2
    # torch has another kernel for heads that it has to broadcast, with other rounding
    tolerance = 1e-14 if name == "falcon" else 0.0
    assert (output(model) - expected).abs().max() <= tolerance
    model.train()
    output(model).square().mean().backward()
    for filter in gfsa.filters_of(model).values():
        assert (filter.theta.grad != 0).all()
    gfsa.unplug(model.eval())
    assert torch.equal(output(model), expected)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][1] is not None])
def test_each_head_has_its_own_coefficients(name: str) -> None:
    """A filter c1·A is attention whose values are c1 times as large, head by head."""
    scales = torch.tensor([0.5, 1.5, -1.0, 2.0], dtype=torch.float64)
    plugged, scaled = built(name), built(name)
    gfsa.plug(plugged, K=3)
    modules = dict(scaled.named_modules())
    scale = CASES[name][1]
    for layer, filter in gfsa.filters_of(plugged).items():
        with torch.no_grad():
            filter.theta[:, 1] = scales - 1
        scale(modules[layer], scales)
    assert (output(plugged) - output(scaled)).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["gpt_neo", "falcon"])
def test_decoding_with_a_cache_is_refused(name: str) -> None:
    model = built(name)
    gfsa.plug(model)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        cache = model(ids).past_key_values
        with pytest.raises((ValueError, RuntimeError), match="not square"):
            model(ids[:, :1], past_key_values=cache)
