"""Efficient Attention: an attention map of low rank, all of whose powers are linear in n."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gfsa.operators.base import (
    PLAIN,
    Coefficients,
    Operator,
    at_least_float32,
    columns_of,
    value_of,
)
from gfsa.operators.call import no_autocast
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
        return _polynomial(self.rows, self.columns, v, coeffs.to(self.rows.dtype))

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


def _polynomial(rows: Tensor, columns: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
    r""":math:`Y = c_0 V + R\,T`, where :math:`T = \sum_{k \ge 1} c_k M^{k-1} S`.

    For :math:`A = R\,C^\top` with the small matrices :math:`S = C^\top V`, :math:`M = C^\top R`.

    Args:
        rows, columns: R and C, ``(..., H, N, D)``, in full precision.
        v: ``(..., H, N, E)``, in the dtype of the result.
        coeffs: ``(H, m+1)`` or ``(m+1,)`` with m > 0, in the dtype of R.
    """
    full = full_precision(v)
    with no_autocast(v.device):
        if torch.is_grad_enabled() and _own_gradient_serves(rows, columns, full, coeffs):
            return _Polynomial.apply(rows, columns, full, coeffs, v.detach())
        weights = columns_of(coeffs)
        content, mixing = _small(rows, columns, full, weights)
        total = rows @ _nested(content, mixing, weights)[0]
        return torch.addcmul(total, weights[0], full).to(v.dtype)


def _own_gradient_serves(rows: Tensor, columns: Tensor, v: Tensor, coeffs: Tensor) -> bool:
    """Whether :class:`_Polynomial` can serve: plain tensors, not broadcast, in eager mode."""
    if torch.compiler.is_compiling() or type(v) not in PLAIN:
        # the compiler fuses the separate operations itself
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        # functorch and forward-mode differentiation need the separate operations
        return False
    batch = rows.shape[:-2]
    heads = coeffs.shape[:-1] in ((), batch[-1:])
    return len(batch) > 0 and heads and batch == columns.shape[:-2] == v.shape[:-2]


def _small(
    rows: Tensor, columns: Tensor, v: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """S, and M if there is a power that needs it."""
    gather = columns.transpose(-2, -1)
    return gather @ v, gather @ rows if len(weights) > 2 else None


def _nested(content: Tensor, mixing: Tensor | None, weights: Sequence[Tensor]) -> list[Tensor]:
    """Horner's sums, the whole one first: ``h_j = c_(j+1)·S + M·h_(j+1)``, so T is h_0."""
    sums = [weights[-1] * content]
    for weight in reversed(weights[1:-1]):
        assert mixing is not None
        sums.insert(0, torch.addcmul(mixing @ sums[0], weight, content))
    return sums


class _Polynomial(torch.autograd.Function):
    r"""The same with a gradient of fewer passes over the tokens than autograd's.

    Autograd passes over them once for each product, and once more to add the product up. With
    :math:`\dot T = R^\top \dot Y`, and :math:`\dot S, \dot M` from it by Horner backwards,

    .. math:: \dot R = \dot Y T^\top + C \dot M, \quad
              \dot C = V \dot S^\top + R \dot M^\top, \quad
              \dot V = c_0 \dot Y + C \dot S

    where each product is added in place. ``rounded`` is V in its own dtype, fewer bytes to read;
    the kernel that adds the last term rounds the result to that dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, columns: Tensor, v: Tensor, coeffs: Tensor, rounded: Tensor
    ) -> Tensor:
        weights = columns_of(coeffs)
        content, mixing = _small(rows, columns, v, weights)
        ctx.save_for_backward(rows, columns, v, coeffs, content, mixing)
        total = rows @ _nested(content, mixing, weights)[0]
        out = torch.empty_like(total, dtype=rounded.dtype)
        return torch.addcmul(total, weights[0], rounded, out=out)

    @staticmethod
    def backward(ctx: Any, rounded: Tensor) -> tuple[Tensor | None, ...]:
        # the forward ran without autocast, so its gradient does, also if the caller is within it
        with no_autocast(rounded.device):
            return _Polynomial._gradients(ctx, rounded)

    @staticmethod
    def _gradients(ctx: Any, rounded: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns, v, coeffs, content, mixing = ctx.saved_tensors
        wants_rows, wants_columns, wants_v, wants_coeffs, _ = ctx.needs_input_grad
        weights = columns_of(coeffs)
        if torch.is_grad_enabled():
            # for a second derivative autograd has to record how these are computed
            content, mixing = _small(rows, columns, v, weights)
        g = full_precision(rounded)
        sums = _nested(content, mixing, weights)
        dsum, dcontent, dmixing = rows.transpose(-2, -1) @ g, None, None
        dcoeffs = [_inner(g, v)] if wants_coeffs else []
        for place, weight in enumerate(weights[1:]):
            if wants_coeffs:
                dcoeffs.append((dsum * content).sum((-2, -1)))
            dcontent = _sum(dcontent, weight * dsum)
            if place + 1 < len(sums):
                assert mixing is not None
                dmixing = _sum(dmixing, dsum @ sums[place + 1].transpose(-2, -1))
                dsum = mixing.transpose(-2, -1) @ dsum
        assert dcontent is not None
        drows = dcolumns = dv = dc = None
        if wants_rows:
            drows = _add_product(g @ sums[0].transpose(-2, -1), columns, dmixing)
        if wants_columns:
            back = None if dmixing is None else dmixing.transpose(-2, -1)
            dcolumns = _add_product(v @ dcontent.transpose(-2, -1), rows, back)
        if wants_v:
            dv = torch.addcmul(columns @ dcontent, weights[0], rounded)
        if wants_coeffs:
            dc = torch.stack(dcoeffs, -1).sum_to_size(coeffs.shape)
        return drows, dcolumns, dv, dc, None


def _add_product(total: Tensor, x: Tensor, small: Tensor | None) -> Tensor:
    """``total + x @ small``, written to ``total``, to which there is no other reference."""
    if small is None:
        return total
    batches = math.prod(total.shape[:-2])
    flat = [y.reshape(batches, *y.shape[-2:]) for y in (total, x, small)]
    return flat[0].baddbmm_(*flat[1:]).reshape(total.shape)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """``Σ x∘y`` of each head of each sequence, as the trace of a product: x and y are read once."""
    return (x.transpose(-2, -1) @ y).diagonal(dim1=-2, dim2=-1).sum(-1)


def _sum(x: Tensor | None, y: Tensor) -> Tensor:
    return y if x is None else x + y
