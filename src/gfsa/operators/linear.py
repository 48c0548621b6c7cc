"""Efficient Attention: an attention map of low rank, all of whose powers are linear in n."""

from __future__ import annotations

import torch
from torch import Tensor

from gfsa.operators.call import no_autocast
from gfsa.operators.operator import Coefficients, Operator, at_least_float32, columns_of, value_of
from gfsa.operators.visibility import Visibility


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
        self.key_padding_mask = key_padding_mask
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

    def polynomial(
        self, coeffs: Tensor | Coefficients, v: Tensor, exclusive: Tensor | None = None
    ) -> Tensor:
        if exclusive is not None:
            return super().polynomial(coeffs, v, exclusive)
        coeffs = value_of(coeffs)
        if coeffs.shape[-1] == 1:
            return (columns_of(coeffs)[0] * v).to(v.dtype)
        weights, full = columns_of(coeffs.to(self.rows.dtype)), full_precision(v)
        gather = self.columns.transpose(-2, -1)
        with no_autocast(v.device):
            content = gather @ full
            # Horner: T = c_1·C + G·(c_2·C + G·(…))
            total = weights[-1] * content
            if len(weights) > 2:
                mixing = gather @ self.rows
                for weight in reversed(weights[1:-1]):
                    total = torch.addcmul(mixing @ total, weight, content)
            return torch.addcmul(self.rows @ total, weights[0], full).to(v.dtype)

    def visibility(self) -> Visibility:
        padding = self.key_padding_mask
        return Visibility() if padding is None else Visibility(~padding[..., None, :])

    def dense(self) -> Tensor:
        return self.rows @ self.columns.transpose(-2, -1)


def full_precision(x: Tensor) -> Tensor:
    """``x`` in float32 at least, and contiguous: products would copy it for that."""
    # a cast makes a contiguous copy; without a cast, this leaves the layout as it is
    cast = x.to(at_least_float32(x.dtype), memory_format=torch.contiguous_format)
    return cast.contiguous()
