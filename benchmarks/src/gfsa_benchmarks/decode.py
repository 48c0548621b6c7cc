"""The suites ``decode`` and ``decode-static``: one new token of a GPT-2-shaped model.

The cache is filled, and grows or is static. On a GPU the filter is measured by torch's attention
calls and by the kernel that does the whole token in one launch, whichever of them is chosen.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gfsa.operators.fused import eligibility
from gfsa.plugs import plug
from gfsa_benchmarks.case import Case, Setting, Shape, Variant

LAYERS = 12
VOCABULARY = 50257


def decode(shape: Shape, setting: Setting) -> Case:
    """``shape`` is that of each layer's cache: batch, heads, cached tokens, head dim."""
    return _case(shape, setting, static=False)


def decode_static(shape: Shape, setting: Setting) -> Case:
    """The same with a static cache, whose steps ``--graphs`` captures."""
    return _case(shape, setting, static=True)


def _case(shape: Shape, setting: Setting, static: bool) -> Case:
    if shape.padded:
        raise ValueError(f"the decode suites take no padded shapes, got the shape {shape}")
    plain = _gpt2(shape, setting)
    variants = [_variant("plain", plain, shape, setting, static, kernel=False)]
    for name, K in (("gfsa degree 1", None), ("gfsa", 3)):
        model = copy.deepcopy(plain)
        plug(model, K=K, w0=0.1, w1=0.8)
        variants.append(_variant(name, model, shape, setting, static, kernel=False))
    if setting.device.type == "cuda":
        variants.append(_variant("gfsa kernel", model, shape, setting, static, kernel=True))
    return Case(f"{shape}", variants)


@contextmanager
def _measured(kernel: bool) -> Iterator[None]:
    """Choose the kernel for a decoded token where it serves, or never."""
    before = eligibility.DECODE_IS_MEASURED
    eligibility.DECODE_IS_MEASURED = kernel
    try:
        yield
    finally:
        eligibility.DECODE_IS_MEASURED = before


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


def _variant(
    name: str, model: Any, shape: Shape, setting: Setting, static: bool, kernel: bool
) -> Variant:
    from transformers import DynamicCache, StaticCache

    # a multiple of 64 rows, as a model that decodes would have
    rows = -(-(shape.tokens + 1) // 64) * 64
    cache: Any = (
        StaticCache(config=model.config, max_cache_len=rows)
        if static
        else DynamicCache(config=model.config)
    )
    prompt = torch.randint(VOCABULARY, (shape.batch, shape.tokens), device=setting.device)
    position = torch.full((shape.batch, 1), shape.tokens, device=setting.device)
    with torch.no_grad():
        model(prompt, past_key_values=cache, logits_to_keep=1)

    def forward() -> object:
        with torch.no_grad(), _measured(kernel):
            logits = model(prompt[:, :1], past_key_values=cache, position_ids=position).logits
        _rewind(cache, static)
        return logits

    backend = "torch" if name == "plain" else "fused" if kernel else "sdpa"
    return Variant(name, backend, forward, step=None)


def _rewind(cache: Any, static: bool) -> None:
    """Remove the new token, so that every call decodes at the same length."""
    if not static:
        cache.crop(-1)
        return
    lengths = []
    for layer in cache.layers:
        companions = getattr(layer, "gfsa_powers", {}).values()
        lengths += [held.cumulative_length for held in (layer, *itertools.chain(*companions))]
    # one launch for all layers, so that it does not count in a captured step
    torch._foreach_sub_(lengths, 1)
