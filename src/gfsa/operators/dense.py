"""The specification: the attention map as a matrix, written as in the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.operators.call import AttentionCall, DropoutPlace, check_dropout_place, check_kinds
from gfsa.operators.operator import (
    Coefficients,
    Operator,
    at_least_float32,
    own_share,
    repeat_heads,
    take_heads,
    value_of,
)


class DenseOperator(Operator):
    r"""An attention map as an explicit ``(..., H, N, N)`` matrix.

    .. math:: H = \sum_k c_k A^k, \qquad y = H v

    Every faster operator is tested against this one. It takes any square matrix.

    Args:
        matrix: ``A``, of shape ``(..., H, N, N)``.
        dropout_p: probability of dropping an entry.
        dropout_after: ``"attention"`` drops entries of A once, before its powers are taken (as the
            published BERT and GPT-2 code does); ``"filter"`` drops entries of H (as its vision and
            speech code does).
    """

    holds_matrix = True

    def __init__(
        self, matrix: Tensor, dropout_p: float = 0.0, dropout_after: DropoutPlace = "attention"
    ) -> None:
        check_kinds(matrix=matrix)
        if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2]:
            raise ValueError(
                f"expected a square attention map (..., N, N), got {tuple(matrix.shape)}; "
                "only self-attention has powers"
            )
        check_dropout_place(dropout_after)
        if dropout_p and dropout_after == "attention":
            matrix = F.dropout(matrix, dropout_p)
            dropout_p = 0.0
        self.matrix = matrix
        self.dropout_p = dropout_p

    @classmethod
    def from_qk(
        cls,
        q: Tensor,
        k: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
        dropout_after: DropoutPlace = "attention",
    ) -> DenseOperator:
        r"""``A = softmax(scale·q·kᵀ + mask)``.

        Args:
            q, k, attn_mask, is_causal, scale: as in :func:`gfsa.graph_filter_attention`; k may
                have fewer heads, which are then repeated.
        """
        # the scores and their softmax are kept in float32 at least: every other operator is
        # measured against this one
        dtype = at_least_float32(q.dtype)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        scores = (q.to(dtype) * scale) @ repeat_heads(k, q).to(dtype).transpose(-2, -1)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        if is_causal:
            allowed = torch.ones_like(scores, dtype=torch.bool).tril()
            scores = scores.masked_fill(~allowed, -math.inf)
        return cls(_softmax(scores), dropout_p, dropout_after)

    @classmethod
    def from_call(cls, call: AttentionCall) -> DenseOperator:
        """:meth:`from_qk` with the arguments of ``call``."""
        mask = call.attn_mask
        if call.visible is not None:
            length = call.k.shape[-2]
            mask = call.visible.rows(0, length, length, call.q.device)
        return cls.from_qk(
            *(call.q, call.k, mask, call.is_causal, call.scale),
            dropout_p=call.dropout_p,
            dropout_after=call.dropout_after,
        )

    def apply(self, x: Tensor) -> Tensor:
        return (self.matrix @ repeat_heads(x, self.matrix).to(self.matrix.dtype)).to(x.dtype)

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        v = repeat_heads(v, self.matrix)
        return [v] if degree == 0 else [v, *self.further(self.apply(v), degree - 1)]

    def further(self, power: Tensor, count: int) -> list[Tensor]:
        powers = [power]
        for _ in range(count):
            power = powers[-1]
            if power.shape[-2]:
                # queries that see nothing have rows of NaN in maps that models compute, and keep
                # them in the output. Other queries do not see them, but would multiply them by zero
                power = power.masked_fill(self.matrix[..., :1].isnan(), 0.0)
            powers.append(self.apply(power))
        return powers

    def polynomial(
        self, coeffs: Tensor | Coefficients, v: Tensor, exclusive: Tensor | None = None
    ) -> Tensor:
        v = repeat_heads(v, self.matrix)
        # H is only built when its entries are dropped, or asked for
        dtype = torch.promote_types(v.dtype, self.matrix.dtype)
        if self.dropout_p or self.keeps_map:
            matrix = self.filter(value_of(coeffs), exclusive, v)
            if self.keeps_map:
                self.map = matrix = matrix.to(v.dtype)
            y = F.dropout(matrix, self.dropout_p).to(dtype) @ v.to(dtype)
        else:
            y = super().polynomial(coeffs, v.to(dtype), exclusive)
        return y.to(v.dtype)

    def filter(
        self, coeffs: Tensor, exclusive: Tensor | None = None, v: Tensor | None = None
    ) -> Tensor:
        r"""``H = Σ_k coeffs[..., k]·A^k − diag(a·p)``, the map that replaces A, ``(..., H, N, N)``.

        Args:
            exclusive: the share a as in :meth:`polynomial`; p then depends on ``v``.
        """
        a = self.matrix
        identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        matrix = super().polynomial(coeffs, identity.expand_as(a))
        if exclusive is None:
            return matrix
        if v is None:
            raise TypeError("the exclusive term of H depends on the tokens: pass v")
        v = repeat_heads(v, self.matrix)
        own = own_share(exclusive, self.apply(v), v)
        return matrix - (own * identity).to(matrix.dtype)

    def second_pass(self, heads: Sequence[int]) -> Operator | None:
        if self.dropout_p or self.keeps_map:
            # the whole of H is built
            return None
        return DenseOperator(take_heads(self.matrix, heads))

    def dense(self) -> Tensor:
        return self.matrix


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over the last axis; a row of which every score is -inf becomes zeros, not NaN."""
    # the rows are filled before the softmax, so that no NaN enters the gradient either
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
