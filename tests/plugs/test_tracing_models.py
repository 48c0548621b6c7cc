"""Models of timm and transformers whose attention is traced."""

from __future__ import annotations

import pytest
import timm
import torch
import transformers as hf
from torch import Tensor, nn

import gfsa
from gfsa.plugs.tracing.adapter import TraceError
from support.plugging import check_backbone, disturb, matrix_polynomial


@torch.no_grad()
def test_convit_mixes_two_maps():
    model = timm.create_model(
        "convit_tiny",
        img_size=32,
        patch_size=8,
        embed_dim=12,
        depth=2,
        num_heads=3,
        local_up_to_layer=1,
    )
    report = gfsa.plug(model, dry_run=True, unknown="trace")
    assert list(report.plugged) == ["blocks.0.attn", "blocks.1.attn"]
    assert gfsa.plug(model, dry_run=True).plugged == report.plugged
    attention = model.blocks[0].attn.double()
    nn.init.normal_(attention.pos_proj.weight)
    x = torch.randn(3, 16, attention.dim, dtype=torch.float64)
    attention(x)  # sets the relative positions of this length
    matrix = attention.get_attention(x)
    values = attention.v(x).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
    gfsa.plug(attention, unknown="trace")
    (coefficients,) = disturb(attention)
    y = matrix_polynomial(coefficients, matrix) @ values
    expected = attention.proj(y.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected, rtol=0, atol=1e-12)


TEXT = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}


def deberta() -> nn.Module:
    config = hf.DebertaV2Config(
        **TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
    )
    return hf.DebertaV2Model(config)


def gpt_neo() -> nn.Module:
    config = hf.GPTNeoConfig(
        vocab_size=40,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=32,
    )
    return hf.GPTNeoModel(config)


def swin_v2() -> nn.Module:
    config = hf.Swinv2Config(
        image_size=32, patch_size=4, embed_dim=12, depths=[2, 1], num_heads=[2, 3], window_size=3
    )
    return hf.Swinv2Model(config)


def read(model: nn.Module) -> Tensor:
    dtype = next(model.parameters()).dtype
    if isinstance(model, hf.Swinv2Model):
        images = torch.linspace(-1, 1, 2 * 3 * 32 * 32, dtype=dtype).sin().view(2, 3, 32, 32)
        return model(pixel_values=images).last_hidden_state
    ids = torch.arange(22).view(2, 11)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    options = {"use_cache": False} if isinstance(model, hf.GPTNeoModel) else {}
    return model(input_ids=ids, attention_mask=mask, **options).last_hidden_state[mask.bool()]


@pytest.mark.parametrize(
    ("name", "build"), [("DeBERTa-v2", deberta), ("GPT-Neo", gpt_neo), ("Swin-V2", swin_v2)]
)
def test_transformers_off_the_attention_interface(name, build, tmp_path, supported):
    report = check_backbone(build, read, tmp_path, unknown="trace")
    assert set(report.how.values()) == {"tracer"}
    supported("transformers", name, report)


def test_decoding_with_a_cache_is_refused():
    model = gpt_neo().eval()
    gfsa.plug(model, unknown="trace")
    disturb(model)
    first = model(input_ids=torch.arange(5)[None], use_cache=True)
    with pytest.raises(TraceError, match="decoding with a cache"):
        model(input_ids=torch.tensor([[5]]), past_key_values=first.past_key_values)
