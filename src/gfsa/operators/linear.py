"""Efficient Attention: an attention map of low rank, all of whose powers are linear in n."""

from __future__ import annotations

import torch
from torch import Tensor

from gfsa.operators.base import Operator, columns_of
from gfsa.operators.linear_gradient import full_precision, polynomial


class LinearOperator(Operator):
    r"""Efficient Attention, ``A = ρ_row(Q)·ρ_col(K)ᵀ`` (Shen et al., 2021).

    ρ_row is a softmax over the features of each query, ρ_col one over the tokens for each feature
    of the keys; both sum to one, so A's rows do. With the small matrices
    ``G = ρ_col(K)ᵀ·ρ_row(Q)`` (d×d) and ``C = ρ_col(K)ᵀ·V`` (d×d_v),

    .. math:: A^k V = ρ(Q)\,G^{k-1}\,C
              \quad\Rightarrow\quad
              \sum_k c_k A^k V = c_0 V + ρ(Q) \sum_{k \ge 1} c_k G^{k-1} C

    so a polynomial of any degree passes over the tokens as often as plain attention does.

    Args:
        q, k: ``(..., H, N, D)``.
        key_padding_mask: ``(..., N)``, True where a token is padding and must not be attended to.
    """

    def __init__(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> None:
        self.rows = full_precision(q).softmax(-1)
        k = full_precision(k)
        if key_padding_mask is not None:
            padding = key_padding_mask[..., None, :, None]
            # a finite fill and a second mask: a sequence of padding alone gives zeros, not NaN
            k = k.masked_fill(padding, torch.finfo(k.dtype).min)
            self.columns = k.softmax(-2).masked_fill(padding, 0.0)
        else:
            self.columns = k.softmax(-2)

    def apply(self, x: Tensor) -> Tensor:
        content = self.columns.transpose(-2, -1) @ full_precision(x)
        return (self.rows @ content).to(x.dtype)

    def polynomial(self, coeffs: Tensor, v: Tensor) -> Tensor:
        if coeffs.shape[-1] == 1:
            return (columns_of(coeffs)[0] * v).to(v.dtype)
        return polynomial(self.rows, self.columns, v, coeffs.to(self.rows.dtype))

    def dense(self) -> Tensor:
        return self.rows @ self.columns.transpose(-2, -1)
