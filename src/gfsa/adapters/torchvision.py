"""torchvision: Swin by tracing; its ViT is made of ``nn.MultiheadAttention``."""

from __future__ import annotations

from torch import nn
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2

from gfsa.plugs.adapter import Adapter
from gfsa.plugs.tracing.adapter import KNOWN_TRACER


def find(module: nn.Module) -> Adapter | None:
    """The adapter for ``module`` if it is an attention module of torchvision."""
    known = (ShiftedWindowAttention, ShiftedWindowAttentionV2)
    return KNOWN_TRACER if type(module) in known else None
