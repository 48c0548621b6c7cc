"""Graph-filter attention of degrees one and two by fused GPU kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gfsa.operators.base import Operator
from gfsa.operators.fused import coefficients
from gfsa.operators.fused.autograd import affine_filter_attention, filter_attention, must_be_seen
from gfsa.operators.fused.coefficients import Affine
from gfsa.operators.fused.degree_one import affine_weigh, weigh
from gfsa.operators.fused.eligibility import over_keys
from gfsa.operators.fused.short import launch as short
from gfsa.operators.sdpa import SDPAOperator


class FusedOperator(Operator):
    r"""``c0·V + c1·A·V + c2·A·(A·V)`` by own GPU kernels, forward and backward.

    The second pass reuses the first one's logsumexp, and the combination happens inside it. Nothing
    n×n is made; beside what attention keeps for its backward pass, ``A·V`` is kept.

    A filter of degree one takes torch's attention, with what is around it in a launch each way, and
    on short sequences the kernels of degree two.

    Single passes, :meth:`apply` and :meth:`powers`, are torch's own attention.
    """

    makes_coefficients = True

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
        self.attn_mask = _rows_in_one_piece(attn_mask, q.shape[-2])
        self.dropout_p = dropout_p
        self.is_causal = is_causal
        self.scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        self.enable_gqa = enable_gqa

    def apply(self, x: Tensor) -> Tensor:
        return self._sdpa().apply(x)

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        return self._sdpa().powers(v, degree)

    def polynomial(self, coeffs: Tensor, v: Tensor) -> Tensor:
        q = self.q
        if coeffs.dim() == 1:
            coeffs = coeffs.expand(q.shape[1], -1)
        if coeffs.dtype != torch.float32:
            coeffs = coeffs.float()
        if coeffs.shape[1] == 2:
            if self._is_long():
                return weigh(v, self.apply(v), coeffs)
            coeffs = torch.nn.functional.pad(coeffs, (0, 1))
        return filter_attention(q, self.k, v, coeffs, *self._options())

    def affine(self, theta: Tensor, base: Tensor, basis: Tensor, v: Tensor) -> Tensor:
        q = self.q
        if must_be_seen(q) or not coefficients.takes(theta, base, basis):
            return super().affine(theta, base, basis, v)
        affine = Affine(base, basis)
        if base.shape[1] == 2 and self._is_long():
            return affine_weigh(v, self.apply(v), theta, affine)
        return affine_filter_attention(q, self.k, v, theta, affine, *self._options())

    def _is_long(self) -> bool:
        """Whether the kernels that hold a whole sequence on chip cannot serve."""
        return short.why_not(self.q, self.attn_mask, self.scale) is not None

    def _options(self) -> tuple[Any, ...]:
        seed = None
        if self.dropout_p:
            # drawn on the device, so that a captured graph draws anew in each replay
            seed = torch.randint(2**32, (1,), device=self.q.device)
        return self.attn_mask, seed, self.dropout_p, self.is_causal, self.scale

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


def _rows_in_one_piece(mask: Tensor | None, length: int) -> Tensor | None:
    """``mask`` as the short kernels read it: one that is broadcast over keys is copied for them.

    Compiled models of transformers make such a mask where nothing is hidden.
    """
    if mask is None or length > short.LONGEST or over_keys(mask) or mask.stride(-1) == 1:
        return mask
    return mask.contiguous()
