"""Graph-filter attention of degree two by fused GPU kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfsa.operators.base import Operator
from gfsa.operators.fused.op import filter_attention
from gfsa.operators.sdpa import SDPAOperator


class FusedOperator(Operator):
    r"""``c0·V + c1·A·V + c2·A·(A·V)`` by own GPU kernels, forward and backward.

    The second pass reuses the first one's logsumexp, and the combination happens inside it. Nothing
    n×n is made; beside what attention keeps for its backward pass, ``A·V`` is kept.

    Single passes, :meth:`apply` and :meth:`powers`, are torch's own attention.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        self.q = q
        self.k = k
        self.attn_mask = attn_mask
        self.dropout_p = dropout_p
        self.is_causal = is_causal
        self.scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        self.enable_gqa = enable_gqa

    def apply(self, x: Tensor) -> Tensor:
        return self._sdpa().apply(x)

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        return self._sdpa().powers(v, degree)

    def polynomial(self, coeffs: Tensor, v: Tensor) -> Tensor:
        seed = None
        if self.dropout_p:
            # drawn on the device, so that a captured graph draws anew in each replay
            seed = torch.randint(2**32, (1,), device=v.device)
        return filter_attention(
            self.q,
            self.k,
            v,
            coeffs.expand(self.q.shape[1], 3),
            self.attn_mask,
            seed,
            self.dropout_p,
            self.is_causal,
            self.scale,
        )

    def _sdpa(self) -> SDPAOperator:
        return SDPAOperator(
            self.q,
            self.k,
            self.attn_mask,
            self.dropout_p,
            self.is_causal,
            self.scale,
            self.enable_gqa,
        )
