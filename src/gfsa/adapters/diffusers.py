r"""diffusers: DiT, PixArt, Stable Diffusion 3 and Flux, and what is built of the same attention.

An attention module of diffusers leaves its forward to a *processor*, which calls torch's attention
once. A plugged module runs its processor as it is, and the filter takes the place of that call, so
fused projections and LoRA stay what they are. In joint attention (SD3, Flux) image and text tokens
are one sequence, so its map is square: :math:`H = \sum_k c_k A^k` mixes both.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gfsa.filters import GraphFilter
from gfsa.operators import AttentionOperator
from gfsa.plugs.adapter import Adapter, SwapClass
from gfsa.plugs.checks.proof import REASON, refusal_of_call

try:
    from diffusers.models.transformers.transformer_flux import FluxAttention
except ImportError:
    # an older diffusers, whose Flux has no attention class of its own: no module has its adapter
    FluxAttention = nn.Module

# processors that attend to encoder_hidden_states with queries of other tokens
_ONE_SEQUENCE = {"AttnProcessor2_0", "FusedAttnProcessor2_0"}
# processors that append encoder_hidden_states to queries, keys and values alike
_JOINT = {"JointAttnProcessor2_0", "FusedJointAttnProcessor2_0", "FluxAttnProcessor"}


class _FilterCall(TorchFunctionMode):
    """Puts a module's filter in the place of torch's attention, in one forward of the module."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:
            # torch's compiler cannot look into the method, which is one of few written in Python
            func = torch.unflatten
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.calls += 1
        return self._filter(*args, **kwargs)

    def _filter(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if query.shape[-2] != key.shape[-2]:
            got = f"{query.shape[-2]} queries attend to {key.shape[-2]} keys"
            raise ValueError(refusal_of_call(self.module, got))
        gfsa: GraphFilter = self.module.gfsa
        # its arguments are those of torch's attention, in the same order
        kwargs["dropout_after"] = gfsa.dropout_after
        operator = AttentionOperator(query, key, *args, **kwargs)
        y: Tensor = gfsa(operator, value)
        return y


class _Filtered(nn.Module):
    """The forward of plugged attention modules: that of the module, with the filter inside."""

    processor: Any

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        reason = _refusal_of_call(self.processor, encoder_hidden_states)
        if reason is not None:
            raise ValueError(f"{_name_of(self)} cannot be filtered: {reason}")
        filtering = _FilterCall(self)
        with filtering:
            result = super().forward(hidden_states, encoder_hidden_states, *args, **kwargs)
        if filtering.calls != 1:
            raise ValueError(
                f"{_name_of(self)} called torch's attention {filtering.calls} times, expected once:"
                " its attention backend computes elsewhere. Call "
                "model.set_attention_backend('native'), or gfsa.unplug(model)"
            )
        return result


class FilteredAttention(_Filtered, Attention):
    """Attention of DiT, PixArt, Stable Diffusion and Stable Diffusion 3."""


class FilteredFluxAttention(_Filtered, FluxAttention):
    """Attention of Flux, joint in its first blocks and of one sequence in the others."""


def _name_of(module: nn.Module) -> str:
    return f"{type(module).__name__} with {type(module.processor).__name__}"


def _refusal_of_call(processor: Any, encoder_hidden_states: Tensor | None) -> str | None:
    """Why a call with this processor cannot be filtered, or None if it can."""
    kind = type(processor).__name__
    if kind not in _ONE_SEQUENCE | _JOINT:
        known = ", ".join(sorted(_ONE_SEQUENCE | _JOINT))
        return f"gfsa does not know its processor, expected one of {known}"
    if kind in _ONE_SEQUENCE and encoder_hidden_states is not None:
        return f"it is given encoder_hidden_states: {REASON}. Leave it out with layers=..."
    if getattr(processor, "_parallel_config", None) is not None:
        return "its tokens are split over processes (context parallel). Turn that off"
    return None


def _refusal(name: str, module: Any) -> str | None:
    return REASON if getattr(module, "is_cross_attention", False) else None


_ADAPTERS: dict[type[nn.Module], Adapter] = {
    Attention: SwapClass(FilteredAttention, "heads", _refusal),
    FluxAttention: SwapClass(FilteredFluxAttention, "heads", _refusal),
}


def find(module: nn.Module) -> Adapter | None:
    """The adapter for ``module`` if it is attention of diffusers with a processor known here."""
    adapter = _ADAPTERS.get(type(module))
    if adapter is None:
        return None
    known = type(module.processor).__name__ in _ONE_SEQUENCE | _JOINT
    return adapter if known else None
