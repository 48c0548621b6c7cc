"""timm: ViT and DeiT, Swin, CaiT by adapters; families with attention of their own by tracing."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from gfsa.plugs.adapter import Adapter
from gfsa.plugs.tracing.adapter import KNOWN_TRACER

# what the tests have traced. The first four have adapters, but not for every version of timm
_TRACED = {
    ("timm.layers.attention", "Attention"),
    ("timm.models.vision_transformer", "Attention"),
    ("timm.models.swin_transformer", "WindowAttention"),
    ("timm.models.cait", "TalkingHeadAttn"),
    ("timm.layers.attention", "AttentionRope"),
    ("timm.models.beit", "Attention"),
    ("timm.models.eva", "EvaAttention"),
    ("timm.models.swin_transformer_v2", "WindowAttention"),
    ("timm.models.swin_transformer_v2_cr", "WindowMultiHeadAttention"),
    ("timm.models.tnt", "Attention"),
    ("timm.models.vision_transformer_relpos", "RelPosAttention"),
}


def find(module: nn.Module) -> Adapter | None:
    """The adapter for ``module`` if it is an attention module of timm."""
    kind = type(module)
    if not kind.__module__.startswith("timm."):
        return None
    adapter = _adapters()(kind)
    if adapter is None and (kind.__module__, kind.__name__) in _TRACED:
        return KNOWN_TRACER
    return adapter


@functools.cache
def _adapters() -> Callable[[type[nn.Module]], Adapter | None]:
    try:
        from gfsa.plugs.adapters.timm_attention import adapter_for
    except ImportError:
        # an older timm, which keeps its classes elsewhere: they are traced
        return lambda kind: None
    return adapter_for
