"""The arguments of an attention call as one record, and a cache of decisions about calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.operators.base import repeat_heads, take_heads

if TYPE_CHECKING:
    from gfsa.operators.visibility import Visibility

# not torch.nn.functional's, which may be replaced when this module is imported
TORCH_ATTENTION = torch._C._nn.scaled_dot_product_attention
DropoutPlace = Literal["attention", "filter"]
_DROPOUT_PLACES = get_args(DropoutPlace)


class AttentionCall(NamedTuple):
    """What defines the map ``A = softmax(scale·q·kᵀ + mask)``, as every operator takes it.

    Args:
        q, k: ``(..., H, N, D)``; k may have fewer heads with ``enable_gqa``.
        attn_mask: bool (True takes part) or additive, broadcastable to ``(..., H, N, N)``.
        dropout_p: probability of dropping an entry.
        is_causal: a token sees itself and the tokens before it, on top of the mask.
        scale: default ``1/sqrt(D)``.
        enable_gqa: k and v may have fewer heads than q, a divisor.
        dropout_after: whether entries of A or of H are dropped, see
            :class:`~gfsa.operators.DenseOperator`.
        visible: in place of ``attn_mask`` and ``is_causal``: what a query sees, described rather
            than written out as a mask.
    """

    q: Tensor
    k: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    dropout_after: DropoutPlace = "attention"
    visible: Visibility | None = None

    # torch 2.6's compiler knows neither _replace nor properties of named tuples

    def without_dropout(self) -> AttentionCall:
        """The same map, no entry dropped."""
        q, k, attn_mask, _, is_causal, scale, enable_gqa, _, visible = self
        return AttentionCall(
            q, k, attn_mask, 0.0, is_causal, scale, enable_gqa, "attention", visible
        )

    def with_key_mask(self) -> AttentionCall:
        """The same map by a key mask and causality, where ``visible`` has nothing else."""
        visible = self.visible
        if visible is None or visible.pairs is not None:
            return self
        if visible.window is not None or visible.documents is not None:
            return self
        keys = None if visible.keys is None else visible.keys[..., None, :]
        q, k, _, dropout_p, _, scale, enable_gqa, dropout_after, _ = self
        return AttentionCall(
            q, k, keys, dropout_p, visible.causal, scale, enable_gqa, dropout_after
        )

    def reason_for_torch_alone(self) -> str | None:
        """Why torch's attention alone can compute A, or None if other operators can too."""
        if self.q.is_nested:
            return "only torch's attention knows which tokens of a nested tensor belong together"
        # context parallel replaces torch's function, so that a call with the tokens of one process
        # attends to all tokens
        if F.scaled_dot_product_attention is not TORCH_ATTENTION:
            return (
                "torch's attention is replaced (context parallel), and only the replacement knows A"
            )
        return None

    def of_heads(self, heads: Sequence[int]) -> AttentionCall:
        """The map of some query heads, keys repeated for each of them, no entry dropped."""
        return AttentionCall(
            take_heads(self.q, heads),
            take_heads(repeat_heads(self.k, self.q), heads),
            None if self.attn_mask is None else take_heads(self.attn_mask, heads),
            is_causal=self.is_causal,
            scale=self.scale,
            visible=None if self.visible is None else self.visible.of_heads(heads),
        )


Signature = tuple[Any, ...]
"""Everything that a decision about a call depends on: shapes, strides, dtypes and options."""

_Decision = TypeVar("_Decision")


class DecisionCache(dict[Signature, _Decision], Generic[_Decision]):
    """Decisions by the signature of a call; emptied when full.

    A program that never repeats its lengths would fill it; signatures in use are decided again.
    """

    def __init__(self, capacity: int = 4096) -> None:
        super().__init__()
        self.capacity = capacity

    def remember(self, signature: Signature, decision: _Decision) -> None:
        if len(self) >= self.capacity:
            self.clear()
        self[signature] = decision


def check_dropout_place(dropout_after: DropoutPlace) -> DropoutPlace:
    """``dropout_after`` itself, or a ValueError."""
    if dropout_after not in _DROPOUT_PLACES:
        raise ValueError(f"dropout_after must be 'attention' or 'filter', got {dropout_after!r}")
    return dropout_after
