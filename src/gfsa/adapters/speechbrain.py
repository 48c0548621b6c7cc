"""SpeechBrain: relative positions by an adapter, rotary ones by tracing.

Its ``MultiheadAttention`` wraps torch's, which has an adapter of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from speechbrain.nnet.attention import RelPosMHAXL
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa.filters import GraphFilter
from gfsa.operators import DenseOperator
from gfsa.operators.base import at_least_float32
from gfsa.plugs.adapter import Adapter, SwapClass, names_in_forward
from gfsa.plugs.checks.proof import REASON, Owners, crosses_by_design, require_same_tokens
from gfsa.plugs.tracing.adapter import KNOWN_TRACER


class FilteredRelPosMHAXL(RelPosMHAXL):
    r"""Transformer-XL's attention, ``A = softmax(scale·((q + u)·kᵀ + shift((q + w)·pᵀ)))``.

    u and w are learned and shared by all tokens; p are the projected position embeddings.
    """

    gfsa: GraphFilter

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pos_embs: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        return_attn_weights: bool = True,
    ) -> Any:
        require_same_tokens(self, query, key)
        B, N, _ = query.shape
        q, k, v = self._project(query, key, value)
        scores = self._scores(q, k, pos_embs)
        dropped = []
        if attn_mask is not None:
            attn_mask = attn_mask.view(1 if attn_mask.ndim == 2 else B, -1, N, N)
            if attn_mask.dtype == torch.bool:
                dropped.append(attn_mask)
            else:
                scores = scores + attn_mask
        if key_padding_mask is not None:
            dropped.append(key_padding_mask.view(B, 1, 1, N))
        for mask in dropped:
            scores = scores.masked_fill(mask, self.attn_fill_value)
        attention = F.softmax(scores, dim=-1, dtype=at_least_float32(scores.dtype))
        place, dropout_p = self.gfsa.dropout_after, 0.0
        if place == "attention":
            attention = self.dropout_att(attention)
        elif self.training:
            dropout_p = self.dropout_att.p
        # the softmax of a fully masked row is NaN; this makes it zeros
        for mask in dropped:
            attention = attention.masked_fill(mask, 0.0)
        operator = DenseOperator(attention, dropout_p, place)
        v = self.gfsa.mixed(operator, v.transpose(1, 2))
        y = self.gfsa(operator, v)
        out = self.out_proj(y.transpose(1, 2).reshape(B, N, -1))
        if not return_attn_weights:
            return out
        return out, self.gfsa.map(operator, v)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each ``(B, N, H, D)``."""
        B = query.shape[0]
        # the layer splits its weights in one order if value is query, in another if not
        if value is query or torch.equal(value, query):
            packed = F.linear(query, self.in_proj_weight)
            q, k, v = packed.view(B, -1, self.num_heads, self.head_dim * 3).chunk(3, -1)
        else:
            q, k, v = (
                F.linear(x, weight).view(B, -1, self.num_heads, self.head_dim)
                for x, weight in zip((query, key, value), self.in_proj_weight.chunk(3), strict=True)
            )
        if self.vbias is not None:
            v = v + self.value_bias_weight.view(1, 1, self.num_heads, self.vhead_dim)
        return q, k, v

    def _scores(self, q: Tensor, k: Tensor, pos_embs: Tensor) -> Tensor:
        shape = (1, -1, self.num_heads, self.head_dim)
        positions = self.linear_pos(pos_embs).view(shape)
        by_content = (q + self.pos_bias_u.view(shape)).transpose(1, 2) * self.scale
        by_place = (q + self.pos_bias_v.view(shape)).transpose(1, 2) * self.scale
        content = torch.matmul(by_content, k.permute(0, 2, 3, 1))
        place = torch.matmul(by_place, positions.permute(0, 2, 3, 1))
        scores: Tensor = content + self.rel_shift(place)
        return scores


# the names that the forward looked up when the adapter was written; see names_in_forward
_WRITTEN_FOR = (
    "F NotImplementedError _qkv_same_embed_dim attn_fill_value bool chunk contiguous "
    "dropout_att dtype equal float32 functional head_dim in_proj_weight linear "
    "linear_pos masked_fill matmul ndim nn num_heads out_proj permute pos_bias_u "
    "pos_bias_v qk_proj_weight rel_shift scale shape softmax torch transpose "
    "v_proj_weight value_bias_weight vbias vhead_dim view"
)


class RelPosAdapter(SwapClass):
    """``RelPosMHAXL``, except where its place in the model makes it cross-attention."""

    def refusal_inside(self, owners: Owners) -> str | None:
        return REASON if crosses_by_design(owners) else None


REL_POS = RelPosAdapter(FilteredRelPosMHAXL, heads="num_heads")


def find(module: nn.Module) -> Adapter | None:
    """The adapter for ``module`` if it is an attention module of SpeechBrain."""
    if type(module) is RelPosMHAXL:
        return REL_POS if names_in_forward(RelPosMHAXL) == _WRITTEN_FOR else KNOWN_TRACER
    # older versions of SpeechBrain have no RoPEMHA to import
    cls = type(module)
    is_rotary = cls.__module__ == RelPosMHAXL.__module__ and cls.__name__ == "RoPEMHA"
    return KNOWN_TRACER if is_rotary else None
