"""What plug says of attention of transformers that it cannot trace.

The census compares every model that it can trace with the dense formula.
"""

from __future__ import annotations

import pytest
import transformers as hf

import gfsa


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
