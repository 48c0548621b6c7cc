"""Small models with a comparison method in them, its numbers moved."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gfsa_experiments import baselines
from support.encoder import Encoder
from support.families import METHODS


def encoder(depth: int = 2) -> nn.Module:
    return Encoder(9, depth=depth)


def apply(model: nn.Module, method: str, **more: Any) -> baselines.BaselineReport:
    report = baselines.apply(model, METHODS[method].name, **METHODS[method].options, **more)
    with torch.no_grad():
        for parameter in baselines.parameters_of(model):
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return report


def causal_lm(implementation: str = "sdpa") -> Any:
    import transformers as hf

    config = hf.GPT2Config(
        n_embd=12, n_layer=3, n_head=3, vocab_size=30, bos_token_id=1, eos_token_id=29,
        initializer_range=0.5, attn_implementation=implementation,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config).eval()


def bert(**options: Any) -> Any:
    import transformers as hf

    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes |= {"intermediate_size": 20, "vocab_size": 30, "initializer_range": 0.3}
    return hf.BertModel(hf.BertConfig(**sizes, **{**still, **options}), add_pooling_layer=False)


IDS = torch.randint(3, 28, (2, 7), generator=torch.Generator().manual_seed(0))
