"""The suite ``decode``: one new token of a GPT-2-shaped model with a filled cache."""

from __future__ import annotations

import copy
from typing import Any

import torch

from gfsa.plugs import plug
from gfsa_benchmarks.case import Case, Setting, Shape, Variant

LAYERS = 12
VOCABULARY = 50257


def decode(shape: Shape, setting: Setting) -> Case:
    """``shape`` is that of each layer's cache: batch, heads, cached tokens, head dim."""
    if shape.padded:
        raise ValueError(f"the decode suite takes no padded shapes, got the shape {shape}")
    plain = _gpt2(shape, setting)
    variants = [_variant("plain", plain, shape, setting)]
    for name, K in (("gfsa degree 1", None), ("gfsa", 3)):
        model = copy.deepcopy(plain)
        plug(model, K=K)
        variants.append(_variant(name, model, shape, setting))
    return Case(f"{shape}", variants)


def _gpt2(shape: Shape, setting: Setting) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=shape.heads * shape.dim,
        n_layer=LAYERS,
        n_head=shape.heads,
        n_positions=shape.tokens + 1,
    )
    return GPT2LMHeadModel(config).to(setting.device, setting.dtype).eval()


def _variant(name: str, model: Any, shape: Shape, setting: Setting) -> Variant:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    prompt = torch.randint(VOCABULARY, (shape.batch, shape.tokens), device=setting.device)
    with torch.no_grad():
        model(prompt, past_key_values=cache, logits_to_keep=1)

    def forward() -> object:
        with torch.no_grad():
            logits = model(prompt[:, :1], past_key_values=cache).logits
        # remove the new token, so that every call decodes at the same length
        cache.crop(-1)
        return logits

    return Variant(name, "torch" if name == "plain" else "sdpa", forward, step=None)
