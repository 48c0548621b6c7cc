"""transformers models that compute attention outside the interface are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import gfsa
from support.plugging import check_backbone, disturb, matrix_polynomial

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


def codegen() -> nn.Module:
    return hf.CodeGenForCausalLM(
        hf.CodeGenConfig(
            vocab_size=61, n_positions=64, n_ctx=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4
        )
    )


def image_gpt() -> nn.Module:
    return hf.ImageGPTModel(
        hf.ImageGPTConfig(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    )


def layoutlm_v3() -> nn.Module:
    return hf.LayoutLMv3Model(
        hf.LayoutLMv3Config(
            **TEXT,
            visual_embed=False,
            coordinate_size=5,
            shape_size=6,
            max_2d_position_embeddings=32,
        )
    )


def sew_d() -> nn.Module:
    return hf.SEWDModel(
        hf.SEWDConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            conv_dim=(16,),
            conv_stride=(2,),
            conv_kernel=(2,),
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=2,
            squeeze_factor=1,
            position_buckets=8,
            max_position_embeddings=64,
        )
    )


def blip_text() -> nn.Module:
    config = hf.BlipTextConfig(**TEXT, encoder_hidden_size=32)
    return hf.models.blip.modeling_blip_text.BlipTextModel(config, add_pooling_layer=False)


def vilt() -> nn.Module:
    return hf.ViltModel(hf.ViltConfig(**TEXT, image_size=16, patch_size=8))


def bloom() -> nn.Module:
    return hf.BloomModel(hf.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4))


def mpt() -> nn.Module:
    return hf.MptModel(
        hf.MptConfig(vocab_size=61, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)
    )


def hiera() -> nn.Module:
    return hf.HieraModel(
        hf.HieraConfig(
            embed_dim=16,
            image_size=[16, 16],
            patch_size=[3, 3],
            patch_stride=[2, 2],
            patch_padding=[1, 1],
            depths=[1, 2],
            num_heads=[4, 4],
            query_stride=[2, 2],
            masked_unit_size=[4, 4],
            num_query_pool=1,
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


MORE = {
    "codegen": codegen,
    "image_gpt": image_gpt,
    "layoutlm_v3": layoutlm_v3,
    "sew_d": sew_d,
    "blip_text": blip_text,
    "vilt": vilt,
    "bloom": bloom,
    "mpt": mpt,
    "hiera": hiera,
}
"""Softmax modules, softmax functions of their own, products by keyword, windows beside heads."""


def built(name: str) -> Any:
    torch.manual_seed(0)
    build = MORE[name] if name in MORE else CASES[name][0]
    return build().double().eval()


def output(model: Any, samples: int = 2, tokens: int = 10) -> Tensor:
    return run(model, samples, tokens)[0]


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def run(model: Any, samples: int = 2, tokens: int = 10, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, (hf.Swinv2Model, hf.HieraModel)):
        pixels = torch.randn(samples, 3, 16, 16, generator=generator, dtype=_dtype(model))
        return model(pixel_values=pixels, **options)
    if isinstance(model, hf.SEWDModel):
        sound = torch.randn(samples, 2 * tokens, generator=generator, dtype=_dtype(model))
        return model(input_values=sound, **options)
    ids = torch.randint(3, 61, (samples, tokens), generator=generator)
    if isinstance(model, hf.LayoutLMv3Model):
        options["bbox"] = ids[..., None].expand(-1, -1, 4) % 32
    if isinstance(model, hf.ViltModel):
        options["pixel_values"] = torch.ones(samples, 3, 16, 16, dtype=_dtype(model))
    with torch.random.fork_rng():
        # ViLT draws the patches of an image at random
        torch.manual_seed(2)
        return model(input_ids=ids, **options)


@pytest.mark.parametrize("name", ["gpt_neo", "falcon"])
def test_decoding_with_a_cache_is_refused(name: str) -> None:
    model = built(name)
    gfsa.plug(model)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        cache = model(ids).past_key_values
        with pytest.raises((ValueError, RuntimeError), match="not square"):
            model(ids[:, :1], past_key_values=cache)


# these compute their softmax in float32
TOLERANCE = {"bloom": 1e-6, "mpt": 1e-6}
SIZES = [(1, 10), (2, 10), (4, 10), (4, 4), (7, 7)]


# the first map that Swin-V2 returns is that of a later layer, whose inputs are filtered, too
@pytest.mark.parametrize("name", [name for name in (*CASES, *MORE) if name != "swin_v2"])
@torch.no_grad()
def test_output_attentions_is_the_filtered_map(name: str) -> None:
    model, plain = built(name), built(name)
    if name.startswith("falcon"):
        for either in (model, plain):
            either.set_attn_implementation("eager")
    gfsa.plug(model)
    coefficients = disturb(model)
    maps = run(model, output_attentions=True).attentions
    plain_maps = run(plain, output_attentions=True).attentions
    # later layers have other inputs than those of the plain model
    expected = matrix_polynomial(coefficients[0], plain_maps[0].double())
    torch.testing.assert_close(maps[0].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("codegen", "CodeGen"),
        ("image_gpt", "ImageGPT"),
        ("layoutlm_v3", "LayoutLMv3"),
        ("blip_text", "BLIP, text"),
        ("vilt", "ViLT"),
        ("hiera", "Hiera"),
    ],
)
def test_backbone(name: str, label: str, tmp_path: Any, supported: Any) -> None:
    report = check_backbone(MORE[name], output, tmp_path)
    assert set(report.how.values()) == {"tracer"}
    supported("transformers", label, report)


def test_mixers_without_a_softmax_are_not_said_to_have_one() -> None:
    mamba = hf.Mamba2Config(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, num_heads=8, head_dim=8, n_groups=1
    )
    for unknown in ("refuse", "trace"):
        with pytest.raises(ValueError, match="calls neither softmax") as error:
            gfsa.plug(hf.Mamba2Model(mamba), unknown=unknown)
        assert "follows its softmax" not in str(error.value)


def test_attention_outside_the_signs_is_listed() -> None:
    config = hf.DabDetrConfig(
        hidden_size=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_queries=10,
        backbone_config=hf.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
        ),
    )
    report = gfsa.plug(hf.DabDetrModel(config), dry_run=True)
    refusal = report.skipped["decoder.layers.0.self_attn.self_attn"]
    assert "projected outside it" in refusal
    funnel = hf.FunnelConfig(vocab_size=61, block_sizes=[1], d_model=32, n_head=4, d_head=8)
    with pytest.raises(ValueError, match="FunnelRelMultiheadAttention has no attribute"):
        gfsa.plug(hf.FunnelBaseModel(funnel))
