"""Which keys each query of a layer may attend to, read from the layer's masks.

A mean over tokens must not include padding, nor later tokens in a causal model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gfsa.operators.base import at_least_float32
from gfsa.operators.call import AttentionCall


@dataclass(frozen=True)
class Visibility:
    """What each query sees; without any mask, all keys.

    Args:
        keys: ``(..., H or 1, N)``, True where a key is visible to queries.
        pairs: ``(..., H or 1, N, N)``, True where a query (row) sees a key (column); replaces
            ``keys`` and ``causal``.
        causal: a query sees itself and the tokens before it.
    """

    keys: Tensor | None = None
    pairs: Tensor | None = None
    causal: bool = False

    @classmethod
    def from_masks(
        cls, pairs: Tensor | None = None, keys: Tensor | None = None, causal: bool = False
    ) -> Visibility:
        """The visibility that a library's masks describe.

        Args:
            pairs: bool (True is visible) or additive, ``(N, N)``, ``(B, N, N)`` or
                ``(B, H, N, N)``, the queries' axis possibly of size 1.
            keys: bool ``(B, N)``, True where a token counts.
            causal: on top of the masks.
        """
        if pairs is not None:
            pairs = pairs[:, None] if pairs.dim() == 3 else pairs[(None,) * (4 - pairs.dim())]
        return cls._of(pairs, None if keys is None else keys[:, None, :], causal)

    @classmethod
    def from_call(cls, call: AttentionCall) -> Visibility:
        """The visibility in an attention call, whose mask broadcasts to ``(..., H, N, N)``."""
        mask = call.attn_mask
        if mask is not None:
            mask = mask[(None,) * (max(3, call.q.dim()) - mask.dim())]
        return cls._of(mask, None, call.is_causal)

    @classmethod
    def _of(cls, pairs: Tensor | None, keys: Tensor | None, causal: bool) -> Visibility:
        """From a mask ``(..., H or 1, N or 1, N)`` and keys ``(..., 1, N)``."""
        if pairs is None:
            return cls(keys, None, causal)
        if pairs.is_floating_point():
            pairs = pairs > hidden_below(pairs.dtype)
        pairs = pairs.bool()
        if keys is not None:
            pairs = pairs & keys[..., None, :]
        if pairs.shape[-2] == 1:
            # the same keys for every query
            return cls(pairs[..., 0, :], None, causal)
        if causal:
            rows, columns = pairs.shape[-2], max(pairs.shape[-2:])
            earlier = torch.ones(rows, columns, dtype=torch.bool, device=pairs.device).tril()
            pairs = pairs & earlier
        return cls(None, pairs)

    @property
    def mask(self) -> Tensor | None:
        """Bool, broadcastable to ``(..., H, N, N)``; ``causal`` applies on top of it."""
        return self.keys[..., None, :] if self.keys is not None else self.pairs

    def rows(self, start: int, stop: int, length: int, device: torch.device) -> Tensor:
        """True where queries ``start … stop`` see a key: broadcastable to ``(..., H, rows, N)``.

        Args:
            length: N, the number of keys.
        """
        if self.pairs is not None:
            return self.pairs[..., start:stop, :].expand(*self.pairs.shape[:-2], -1, length)
        visible = torch.ones(1, length, dtype=torch.bool, device=device)
        if self.keys is not None:
            visible = visible & self.keys[..., None, :]
        if self.causal:
            position = torch.arange(length, device=device)
            visible = visible & (position <= position[start:stop, None])
        return visible

    def visible_keys(self) -> Tensor | None:
        """``(..., N)``, True where some query of some head sees the key; None if all are seen."""
        if self.keys is not None:
            return self.keys.any(-2)
        return None if self.pairs is None else self.pairs.any(-2).any(-2)

    def mean(self, x: Tensor, queries: int) -> Tensor:
        r""":math:`m_i = \frac{1}{|S_i|} \sum_{j \in S_i} x_j`, where query i sees the keys S_i.

        Args:
            x: ``(B, H, N, D)``.
            queries: the number of queries, the newest tokens if there are fewer than N.

        Returns:
            ``(B, H, queries or 1, D)`` in float32 at least; zeros for a query that sees no key.
        """
        dtype = at_least_float32(x.dtype)
        if self.pairs is not None:
            # weights rather than a sum to divide, which could leave the range of float16
            weights = self.pairs.to(dtype) / self.pairs.sum(-1, keepdim=True).clamp(min=1)
            return (weights.to(x.dtype) @ x).to(dtype)
        if self.keys is not None:
            x = x.masked_fill(~self.keys[..., None], 0.0)
        if self.causal and torch.are_deterministic_algorithms_enabled():
            # torch's cumsum is not deterministic on a GPU
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
        """The matrix of :meth:`mean`, ``(B or 1, H or 1, N, N)``: row i has ``1/|S_i|`` on S_i."""
        visible = self.rows(0, length, length, like.device)
        visible = visible.expand(*visible.shape[:-2], length, length)
        visible = visible[(None,) * (4 - visible.dim())]
        dtype = at_least_float32(like.dtype)
        return (visible.to(dtype) / visible.sum(-1, keepdim=True).clamp(min=1)).to(like.dtype)

    def for_tokens(self) -> Visibility:
        """The visibility for tokens that are not split into heads: what some head sees."""
        if self.mask is None or self.mask.shape[-3] == 1:
            return self
        keys = None if self.keys is None else self.keys.any(-2, keepdim=True)
        pairs = None if self.pairs is None else self.pairs.any(-3, keepdim=True)
        return Visibility(keys, pairs, self.causal)

    def _counts(self, x: Tensor) -> Tensor:
        if self.keys is not None:
            return self.keys[..., None].int()
        return torch.ones(x.shape[-2], 1, dtype=torch.int32, device=x.device)


def hidden_below(dtype: torch.dtype) -> float:
    """An additive mask below this hides a key: libraries write -inf, or the smallest number."""
    return torch.finfo(dtype).min / 2
