"""timm: the attention of ViT and DeiT. Other families are traced (``plugs/registry.py``)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gfsa.filters import GraphFilter
from gfsa.operators import AttentionOperator
from gfsa.plugs.adapter import Adapter, SwapClass, names_in_forward

try:
    from timm.layers.attention import Attention
except ImportError:
    # an older timm, which keeps the class elsewhere: no module has the adapter below, and all its
    # attention is traced
    Attention = nn.Module


class FilteredAttention(Attention):
    """ViT's attention by torch's kernels: ``softmax(q·kᵀ·scale + mask)``."""

    gfsa: GraphFilter

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        B, N, _ = x.shape
        gate = None if self.gate is None else self.gate(x).sigmoid()
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        dropout_p = self.attn_drop.p if self.training else 0.0
        place = self.gfsa.dropout_after
        operator = AttentionOperator(q, k, attn_mask, dropout_p, is_causal, dropout_after=place)
        y = self.gfsa(operator, v)
        y = self.norm(y.transpose(1, 2).reshape(B, N, self.attn_dim))
        y = y if gate is None else y * gate
        return self.proj_drop(self.proj(y))


# the names that the forward looked up when the adapter was written; see names_in_forward
_WRITTEN_FOR = (
    "F attn_dim attn_drop fused_attn gate head_dim k_norm maybe_add_mask norm num_heads p permute "
    "proj proj_drop q_norm qkv reshape resolve_self_attn_mask scale scaled_dot_product_attention "
    "shape sigmoid softmax training transpose unbind"
)
_ADAPTER = SwapClass(FilteredAttention, heads="num_heads")


def find(module: nn.Module) -> Adapter | None:
    """The adapter for a module of ViT that calls torch's attention, in the forward known here."""
    cls = type(module)
    if cls is not Attention or names_in_forward(cls) != _WRITTEN_FOR:
        return None
    # one that writes its map out is traced
    return _ADAPTER if module.fused_attn else None


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
