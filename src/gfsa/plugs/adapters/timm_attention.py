"""timm's attention of ViT and DeiT, Swin and CaiT, with a filter in the place of the map."""

from __future__ import annotations

from typing import Any

from timm.layers.attention import Attention, maybe_add_mask, resolve_self_attn_mask
from timm.models.cait import TalkingHeadAttn
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from gfsa.filters import GraphFilter
from gfsa.operators import AttentionOperator, DenseOperator, Operator
from gfsa.plugs.adapter import Adapter, SwapClass
from gfsa.plugs.versions import reads


class FilteredAttention(Attention):
    """ViT's attention: ``softmax(q·kᵀ·scale + mask)``, by torch's kernels or by hand."""

    gfsa: GraphFilter

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        B, N, _ = x.shape
        gate = None if self.gate is None else self.gate(x).sigmoid()
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        operator: Operator
        if self.fused_attn:
            operator = _fused(self, q, k, attn_mask, is_causal)
        else:
            scores = (q * self.scale) @ k.transpose(-2, -1)
            mask = resolve_self_attn_mask(N, scores, attn_mask, is_causal)
            operator = _ready_made(self, maybe_add_mask(scores, mask).softmax(-1))
        y = self.gfsa(operator, v)
        y = self.norm(y.transpose(1, 2).reshape(B, N, self.attn_dim))
        y = y if gate is None else y * gate
        return self.proj_drop(self.proj(y))


class FilteredWindowAttention(WindowAttention):
    """Swin's attention: each window a graph of its own, with a learned bias between positions."""

    gfsa: GraphFilter

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        bias = self._get_rel_pos_bias()
        operator: Operator
        if self.fused_attn:
            if mask is not None:
                bias = bias + mask[None, :, None].expand(
                    B // len(mask), -1, self.num_heads, -1, -1
                ).reshape(B, self.num_heads, N, N)
            operator = _fused(self, q, k, bias)
        else:
            scores = (q * self.scale) @ k.transpose(-2, -1) + bias
            if mask is not None:
                # windows of one image after another, each with the mask of its place
                scores = scores.view(-1, len(mask), self.num_heads, N, N) + mask[None, :, None]
                scores = scores.view(B, self.num_heads, N, N)
            operator = _ready_made(self, self.softmax(scores))
        y = self.gfsa(operator, v).transpose(1, 2).reshape(B, N, -1)
        return self.proj_drop(self.proj(y))


class FilteredTalkingHeadAttn(TalkingHeadAttn):
    """CaiT's attention: heads are mixed before and after the softmax; the filter comes last.

    The mixed map is what the layer multiplies with v, so it is the graph here, though its rows do
    not sum to one.
    """

    gfsa: GraphFilter

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        attention = _mix_heads(self.proj_l, scores).softmax(-1)
        operator = _ready_made(self, _mix_heads(self.proj_w, attention))
        y = self.gfsa(operator, v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(y))


def _mix_heads(mixing: nn.Module, maps: Tensor) -> Tensor:
    mixed: Tensor = mixing(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return mixed


def _fused(
    module: Any, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool = False
) -> AttentionOperator:
    return AttentionOperator(
        q,
        k,
        mask,
        dropout_p=module.attn_drop.p if module.training else 0.0,
        is_causal=is_causal,
        dropout_after=module.gfsa.dropout_after,
    )


def _ready_made(module: Any, matrix: Tensor) -> DenseOperator:
    """A map that is there already; dropout by the layer itself, if it acts on the map."""
    if module.gfsa.dropout_after == "attention":
        return DenseOperator(module.attn_drop(matrix))
    return DenseOperator(matrix, module.attn_drop.p if module.training else 0.0, "filter")


# what each adapter was written for; see gfsa.plugs.versions
_WRITTEN_FOR = {
    Attention: (
        "F attn_dim attn_drop fused_attn gate head_dim k_norm maybe_add_mask norm "
        "num_heads p permute proj proj_drop q_norm qkv reshape resolve_self_attn_mask "
        "scale scaled_dot_product_attention shape sigmoid softmax training transpose "
        "unbind"
    ),
    WindowAttention: (
        "_get_rel_pos_bias attn_drop expand functional fused_attn nn num_heads p permute "
        "proj proj_drop qkv reshape scale scaled_dot_product_attention shape softmax "
        "torch training transpose unbind unsqueeze view"
    ),
    TalkingHeadAttn: (
        "attn_drop num_heads permute proj proj_drop proj_l proj_w qkv reshape scale shape "
        "softmax transpose"
    ),
}

_ADAPTERS: dict[type[nn.Module], Adapter] = {
    Attention: SwapClass(FilteredAttention, heads="num_heads"),
    WindowAttention: SwapClass(FilteredWindowAttention, heads="num_heads"),
    TalkingHeadAttn: SwapClass(FilteredTalkingHeadAttn, heads="num_heads"),
}


def adapter_for(kind: type[nn.Module]) -> Adapter | None:
    """The adapter for a class if it is one of these, as they were when this was written."""
    adapter = _ADAPTERS.get(kind)
    return adapter if adapter is not None and reads(kind) == _WRITTEN_FOR[kind] else None
