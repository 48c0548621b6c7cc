"""Graph-filter attention of degrees 1 and 2 by fused GPU kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfsa.kernels import coefficients
from gfsa.kernels.autograd import filter_attention, needs_registered_operator
from gfsa.kernels.degree_one import combine_degree_one
from gfsa.kernels.degree_one_attention import filter_once
from gfsa.kernels.eligibility import (
    SHORT_LENGTH,
    degree_two_serves,
    is_key_mask,
    one_pass_is_fastest,
    refusal_by_short,
)
from gfsa.kernels.problem import Options
from gfsa.operators.base import Coefficients, Operator
from gfsa.operators.call import AttentionCall
from gfsa.operators.sdpa import SDPAOperator
from gfsa.operators.visibility import Visibility


class FusedOperator(Operator):
    r"""``c0·V + c1·A·V + c2·A·(A·V)`` by the library's own GPU kernels, forward and backward.

    The second pass reuses the first one's logsumexp and combines the powers. No n×n tensor is
    made; besides what attention saves for its backward pass, ``A·V`` is saved.

    A filter of degree 1 is one pass with the combination at its end, which saves nothing more than
    attention; shorter sequences, and windows, documents and padded causal rows that one pass
    refuses, take the kernels of degree 2 with c2 = 0, and calls that neither serves run torch's
    attention with one launch each way around it.

    Single passes, :meth:`apply` and :meth:`powers`, are torch's own attention.
    """

    def __init__(self, call: AttentionCall) -> None:
        q, mask, scale = call.q, call.attn_mask, call.scale
        self.call = call
        is_causal = call.is_causal
        if call.visible is not None:
            # eligibility lets causal windows and documents through alone
            mask, is_causal = call.visible.spans(q.shape[-2], q.device), True
        elif mask is not None:
            mask = _with_contiguous_rows(mask, q.shape[-2])
        self.mask = mask
        # kernels are compiled for floats: an int would be compiled in, and serve other scales too
        self.options = Options(
            1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
            is_causal,
            float(call.dropout_p),
        )

    def apply(self, x: Tensor) -> Tensor:
        return SDPAOperator(self.call).apply(x)

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        return SDPAOperator(self.call).powers(v, degree)

    def polynomial(self, coeffs: Tensor | Coefficients, v: Tensor) -> Tensor:
        q, k = self.call.q, self.call.k
        if isinstance(coeffs, Coefficients):
            if needs_registered_operator(q) or not coefficients.takes(coeffs):
                return self.polynomial(coeffs.value(), v)
            powers = coeffs.base.shape[1]
        else:
            if coeffs.dim() == 1:
                coeffs = coeffs.expand(q.shape[1], -1)
            if coeffs.dtype != torch.float32:
                coeffs = coeffs.float()
            powers = coeffs.shape[1]
        if powers == 2:
            scale, is_causal, dropout_p = self.options
            if one_pass_is_fastest(q, self.mask, scale, dropout_p, is_causal):
                return filter_once(q, k, v, coeffs, self.mask, self.options)
            by_short = refusal_by_short(q, self.mask, self.options.scale) is None
            if not by_short and not degree_two_serves(q, self.mask, is_causal, dropout_p):
                return combine_degree_one(v, self.apply(v), coeffs)
            if not isinstance(coeffs, Coefficients):
                coeffs = torch.nn.functional.pad(coeffs, (0, 1))
        seed = None
        if self.options.dropout_p:
            # drawn on the device, so that each replay of a captured graph draws a new one
            seed = torch.randint(2**32, (1,), device=q.device)
        return filter_attention(q, k, v, coeffs, self.mask, seed, self.options)

    def visibility(self) -> Visibility:
        return Visibility.from_call(self.call)


def _with_contiguous_rows(mask: Tensor, length: int) -> Tensor:
    """``mask`` as the short kernels read it: a copy of one that is broadcast over keys.

    Compiled models of transformers make such a mask where nothing is hidden.
    """
    if length > SHORT_LENGTH or is_key_mask(mask) or mask.stride(-1) == 1:
        return mask
    return mask.contiguous()
