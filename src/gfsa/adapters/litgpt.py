"""litgpt: its attention, in which one method computes the map and applies it."""

from __future__ import annotations

import math
from typing import Any

import torch
from litgpt import lora, model
from torch import Tensor, nn

from gfsa.filters import GraphFilter
from gfsa.operators import AttentionOperator, DenseOperator, Operator
from gfsa.operators.base import at_least_float32
from gfsa.plugs.adapter import Adapter, SwapClass

# what the method looked up when the adapter was written: another version may compute another map
_WRITTEN_FOR = (
    "F attention_logit_softcapping attention_scores_scalar bool config device do_softcapping dtype "
    "finfo float head_size mT masked_fill_ math min mscale ones scaled_dot_product_attention size "
    "softmax sqrt to torch transpose triu"
)


class _FilteredMethod(model.CausalSelfAttention):
    gfsa: GraphFilter

    def scaled_dot_product_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """The filter's tokens, ``(B, T, heads, head size)``."""
        if q.shape[2] != k.shape[2]:
            raise NotImplementedError(
                f"litgpt's key-value cache has {k.shape[2]} keys for {q.shape[2]} queries, and no "
                "A·v of past tokens, which a filter needs. Generate without set_kv_cache, or "
                "convert the checkpoint to transformers (litgpt convert_from_litgpt), where "
                "gfsa.load serves generate with a cache"
            )
        y: Tensor = self.gfsa(_operator(self, q, k, mask), v)
        return y.transpose(1, 2)


class FilteredCausalSelfAttention(_FilteredMethod):
    """litgpt's attention: ``softmax(q·kᵀ·scale + mask)``, with softcapped scores in Gemma 2."""


class FilteredLoRAAttention(_FilteredMethod, lora.CausalSelfAttention):
    """The same with low-rank updates of its projections."""


def _operator(module: Any, q: Tensor, k: Tensor, mask: Tensor | None) -> Operator:
    config = module.config
    scale = module.mscale**2 / math.sqrt(config.attention_scores_scalar or config.head_size)
    if config.attention_logit_softcapping is None:
        return AttentionOperator(q, k, mask, is_causal=mask is None, scale=scale)
    scores = model.do_softcapping(q @ k.mT * scale, config.attention_logit_softcapping)
    if mask is None:
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    else:
        scores = scores + mask
    return DenseOperator(scores.softmax(-1, dtype=at_least_float32(q.dtype)).to(q.dtype))


def _heads(module: Any) -> int:
    return int(module.config.n_head)


_ADAPTERS: dict[type[nn.Module], Adapter] = {
    model.CausalSelfAttention: SwapClass(FilteredCausalSelfAttention, heads=_heads),
    lora.CausalSelfAttention: SwapClass(FilteredLoRAAttention, heads=_heads),
}


def find(module: nn.Module) -> Adapter | None:
    """The adapter for ``module`` if it is an attention module of litgpt."""
    kind: Any = type(module)
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        return None
    names = kind.scaled_dot_product_attention.__code__.co_names
    return adapter if " ".join(sorted(names)) == _WRITTEN_FOR else None
