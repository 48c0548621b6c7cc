"""timm: the attention of ViT, DeiT and Swin. Other families are traced (``plugs/registry.py``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gfsa.filters import GraphFilter
from gfsa.operators import AttentionOperator, DenseOperator, Operator
from gfsa.operators.call import DropoutPlace
from gfsa.plugs.adapter import Adapter, SwapClass, names_in_forward

try:
    from timm.layers.attention import Attention, maybe_add_mask, resolve_self_attn_mask
    from timm.models.swin_transformer import WindowAttention
except ImportError:
    # an older timm, which keeps these classes elsewhere: no module has the adapters below, and all
    # its attention is traced
    Attention = WindowAttention = nn.Module


class FilteredAttention(Attention):
    """ViT's attention: ``softmax(q·kᵀ·scale + mask)``, by torch's kernels or written out."""

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
        dropout_p, place = _dropout(self)
        if self.fused_attn:
            operator = AttentionOperator(q, k, attn_mask, dropout_p, is_causal, dropout_after=place)
        else:
            scores = (q * self.scale) @ k.transpose(-2, -1)
            mask = resolve_self_attn_mask(N, scores, attn_mask, is_causal)
            operator = DenseOperator(maybe_add_mask(scores, mask).softmax(-1), dropout_p, place)
        y = self.gfsa(operator, v)
        y = self.norm(y.transpose(1, 2).reshape(B, N, self.attn_dim))
        y = y if gate is None else y * gate
        return self.proj_drop(self.proj(y))


class FilteredWindowAttention(WindowAttention):
    """Swin's attention: each window is a graph of its own, with a learned bias by position."""

    gfsa: GraphFilter

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        bias = self._get_rel_pos_bias()
        dropout_p, place = _dropout(self)
        operator: Operator
        if self.fused_attn:
            if mask is not None:
                bias = bias + mask[None, :, None].expand(
                    B // len(mask), -1, self.num_heads, -1, -1
                ).reshape(B, self.num_heads, N, N)
            operator = AttentionOperator(q, k, bias, dropout_p, dropout_after=place)
        else:
            scores = (q * self.scale) @ k.transpose(-2, -1) + bias
            if mask is not None:
                # windows are ordered image by image; each window position has its own mask
                scores = scores.view(-1, len(mask), self.num_heads, N, N) + mask[None, :, None]
                scores = scores.view(B, self.num_heads, N, N)
            operator = DenseOperator(self.softmax(scores), dropout_p, place)
        y = self.gfsa(operator, v).transpose(1, 2).reshape(B, N, -1)
        return self.proj_drop(self.proj(y))


def _dropout(module: Any) -> tuple[float, DropoutPlace]:
    """The probability of a layer's attention dropout in this forward, and what it acts on."""
    return module.attn_drop.p if module.training else 0.0, module.gfsa.dropout_after


# the names that each forward looked up when its adapter was written; see names_in_forward
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
}

_ADAPTERS: dict[type[nn.Module], Adapter] = {
    Attention: SwapClass(FilteredAttention, heads="num_heads"),
    WindowAttention: SwapClass(FilteredWindowAttention, heads="num_heads"),
}


def find(module: nn.Module) -> Adapter | None:
    """The adapter for ``module`` if the installed timm has the forward that it was written for."""
    cls = type(module)
    adapter = _ADAPTERS.get(cls)
    return adapter if adapter and names_in_forward(cls) == _WRITTEN_FOR[cls] else None


def example_images(model: nn.Module) -> Tensor | None:
    """Two images of the size that a model of timm takes, or None if it does not say."""
    config = getattr(model, "pretrained_cfg", None)
    size = config.get("input_size") if isinstance(config, dict) else None
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if not isinstance(size, (tuple, list)) or len(size) != 3 or weight is None:
        return None
    # a model may have been built for another size than its config
    patches = getattr(model, "patch_embed", None)
    side = getattr(patches, "img_size", None) or getattr(model, "img_size", None)
    side = (side, side) if isinstance(side, int) else side
    channels, *sides = size
    images = torch.randn(2, channels, *(side or sides), generator=torch.Generator().manual_seed(0))
    return images.to(weight.device, weight.dtype)
