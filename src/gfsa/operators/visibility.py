"""Which tokens a token may see: read from a layer's masks, used for means and similarities.

A mean over tokens must not take in padding, and in a causal model nothing that comes later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gfsa.operators import Operator, SDPAOperator
from gfsa.operators.attention import AttentionOperator
from gfsa.operators.base import at_least_float32


@dataclass(frozen=True)
class Sight:
    """What each token of a layer sees; without any mask, all tokens.

    Args:
        keys: ``(B, 1, N)``, True where a token counts.
        pairs: ``(B or 1, H or 1, N, N)``, True where a query (row) sees a key (column); takes the
            place of ``keys`` and ``causal``.
        causal: a token sees itself and what comes before it.
    """

    keys: Tensor | None = None
    pairs: Tensor | None = None
    causal: bool = False

    @property
    def mask(self) -> Tensor | None:
        """Bool, broadcastable to ``(B, H, N, N)``; beside it, ``causal`` has to be heeded."""
        return self.keys[..., None, :] if self.keys is not None else self.pairs

    def mean(self, x: Tensor, queries: int) -> Tensor:
        r""":math:`m_i = \frac{1}{|S_i|} \sum_{j \in S_i} x_j`, S_i being what token i sees.

        Args:
            x: ``(B, H, N, D)``.
            queries: how many tokens ask, the newest ones if they are fewer than N.

        Returns:
            ``(B, H, queries or 1, D)`` in float32 at least; zeros for a token that sees nothing.
        """
        dtype = at_least_float32(x.dtype)
        if self.pairs is not None:
            # weights rather than a sum to divide: that could leave the range of float16
            weights = self.pairs.to(dtype) / self.pairs.sum(-1, keepdim=True).clamp(min=1)
            return (weights.to(x.dtype) @ x).to(dtype)
        if self.keys is not None:
            x = x.masked_fill(~self.keys[..., None], 0.0)
        if self.causal and torch.are_deterministic_algorithms_enabled():
            # torch has no running sum on a GPU that is the same every time
            weights = self.dense(x.shape[-2], x)[..., x.shape[-2] - queries :, :]
            return (weights @ x).to(dtype)
        if self.causal:
            count = self._counts(x).cumsum(-2).clamp(min=1)
            return (x.cumsum(-2, dtype=dtype) / count)[..., x.shape[-2] - queries :, :]
        if self.keys is not None:
            count = self._counts(x).sum(-2, keepdim=True).clamp(min=1)
            return x.sum(-2, keepdim=True, dtype=dtype) / count
        return x.mean(-2, keepdim=True, dtype=dtype)

    def dense(self, length: int, like: Tensor) -> Tensor:
        """M, ``(B or 1, H or 1, N, N)``: row i has ``1/|S_i|`` where i sees."""
        seen = torch.ones(length, length, dtype=torch.bool, device=like.device)
        seen = (seen.tril() if self.causal else seen)[None, None]
        seen = seen if self.mask is None else seen & self.mask
        weights = seen.to(at_least_float32(like.dtype)) / seen.sum(-1, keepdim=True).clamp(min=1)
        return weights.to(like.dtype)

    def for_tokens(self) -> Sight:
        """The same for tokens that are not split into heads: seen by one head is seen."""
        if self.mask is None or self.mask.shape[1] == 1:
            return self
        keys, pairs = (x if x is None else x.any(1, keepdim=True) for x in (self.keys, self.pairs))
        return Sight(keys, pairs, self.causal)

    def _counts(self, x: Tensor) -> Tensor:
        if self.keys is not None:
            return self.keys[..., None].int()
        return torch.ones(x.shape[-2], 1, dtype=torch.int32, device=x.device)


def sight(pairs: Tensor | None = None, keys: Tensor | None = None, causal: bool = False) -> Sight:
    """A sight from masks of any kind.

    Args:
        pairs: bool (True is seen) or additive, ``(N, N)`` up to ``(B, H, N, N)``.
        keys: bool ``(B, N)``, True where a token counts.
        causal: on top of the masks.
    """
    keys = None if keys is None else keys[:, None, :]
    if pairs is None:
        return Sight(keys, None, causal)
    if pairs.is_floating_point():
        pairs = pairs > hidden_below(pairs.dtype)
    pairs = pairs.bool()
    while pairs.dim() < 4:
        pairs = pairs[None] if pairs.dim() < 3 else pairs[:, None]
    if keys is not None:
        pairs = pairs & keys[..., None, :]
    if causal:
        pairs = pairs & torch.ones_like(pairs[:1, :1]).expand(-1, -1, pairs.shape[-1], -1).tril()
    if pairs.shape[-2] == 1:
        return Sight(pairs[..., 0, :])
    return Sight(None, pairs)


def hidden_below(dtype: torch.dtype) -> float:
    """An additive mask below this hides a key: libraries write -inf, or the smallest number."""
    return torch.finfo(dtype).min / 2


def sight_of_operator(operator: Operator) -> Sight:
    """What the operator's own masks say.

    Raises:
        TypeError: for a map that is a matrix already, whose zeros may be masks or dropout.
    """
    # while decoding, the rows of the newest tokens are inside
    inner: Any = getattr(operator, "rows", operator)
    if not isinstance(inner, (AttentionOperator, SDPAOperator)):
        raise TypeError(
            f"which keys a query sees cannot be read from a {type(inner).__name__}: "
            "gfsa.baselines.apply(model, 'attnscale') reads the layer's masks instead"
        )
    return sight(inner.attn_mask, causal=inner.is_causal)


def attend_alike(x: Tensor, seen: Sight, temperature: float) -> Tensor:
    r""":math:`\mathrm{softmax}(\hat x \hat x^\top / τ)\,x` over what each token sees.

    :math:`\hat x` has rows of length one. By torch's attention kernels: no n×n matrix is made
    that the masks have not made.

    Args:
        x: ``(B, 1, N, D)``.
    """
    # a row of zeros stays one
    direction = x / x.norm(dim=-1, keepdim=True, dtype=at_least_float32(x.dtype)).clamp(min=1e-12)
    direction = direction.to(x.dtype)
    return AttentionOperator(
        direction,
        direction,
        seen.mask,
        is_causal=seen.causal,
        scale=1 / temperature,
        backend="sdpa",
    ).apply(x)


def check_number(
    name: str, value: Any, least: float = -math.inf, above: float = -math.inf
) -> float:
    """``value`` as a finite float of at least ``least`` and above ``above``, or a ValueError."""
    fine = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not fine or not math.isfinite(value) or value < least or value <= above:
        wanted = "a finite number"
        if least > -math.inf:
            wanted += f" of at least {least:g}"
        if above > -math.inf:
            wanted += f" above {above:g}"
        raise ValueError(f"{name} must be {wanted}, got {value!r:.40}")
    return float(value)
