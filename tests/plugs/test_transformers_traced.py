"""transformers models that compute attention outside the interface are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import gfsa
from support.plugging import disturb, matrix_polynomial

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


CASES: dict[str, Callable[[], nn.Module]] = {
    "deberta_v2": deberta,
    "gpt_neo": gpt_neo,
    "xlnet": xlnet,
    "mpnet": mpnet,
    "falcon": falcon,
    "bloom": bloom,
}


def built(name: str) -> Any:
    torch.manual_seed(0)
    return CASES[name]().double().eval()


def output(model: Any, samples: int = 2, tokens: int = 10) -> Tensor:
    return run(model, samples, tokens)[0]


def run(model: Any, samples: int = 2, tokens: int = 10, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    return model(input_ids=torch.randint(3, 61, (samples, tokens), generator=generator), **options)


# these compute their softmax in float32
TOLERANCE = {"bloom": 1e-6, "mpt": 1e-6}
SIZES = [(1, 10), (2, 10), (4, 10), (4, 4), (7, 7)]


@pytest.mark.parametrize("name", CASES)
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
