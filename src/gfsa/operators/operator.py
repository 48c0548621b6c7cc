"""The base class of operators, which multiply tokens by an attention map: ``apply(x) = A·x``.

Beside it are the coefficients that a filter gives an operator, and the weighted sum of the powers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gfsa.operators.visibility import Visibility

PLAIN = (Tensor, torch.nn.Parameter)
"""Kinds of tensors that have values, and sizes that are numbers."""


class Coefficients(NamedTuple):
    r"""A filter's coefficients as it learns them, :math:`c = base + θ \cdot basis`.

    A fused kernel computes ``c`` and the gradient of θ itself, other operators call :meth:`value`.

    Args:
        theta: the learned numbers θ, ``(H, L)``.
        base: ``(H, m+1)``, the coefficients at θ = 0.
        basis: ``(L, m+1)``, or ``(H, L, m+1)`` if it differs from head to head.
        is_diagonal: whether the k-th learned number changes the k-th coefficient alone.
    """

    theta: Tensor
    base: Tensor
    basis: Tensor
    is_diagonal: bool = False

    def value(self) -> Tensor:
        """``c`` as a tensor ``(H, m+1)``, differentiable in θ."""
        if self.is_diagonal:
            # one kernel instead of three, which counts where single tokens are decoded
            diagonal = self.basis.diagonal(dim1=-2, dim2=-1)
            return torch.addcmul(self.base, self.theta, diagonal)
        # not a matmul, which autocast and TF32 would round
        change: Tensor = (self.theta.unsqueeze(-1) * self.basis).sum(1)
        return self.base + change


def value_of(coeffs: Tensor | Coefficients) -> Tensor:
    """Coefficients as a tensor, ``(H, m+1)`` or ``(m+1,)``."""
    return coeffs.value() if isinstance(coeffs, Coefficients) else coeffs


def combine(
    coeffs: Tensor,
    powers: Sequence[Tensor],
    in_one_go: bool = False,
    exclusive: Tensor | None = None,
) -> Tensor:
    r"""The weighted sum of the powers of one operator, head by head.

    .. math:: y_h = \sum_k c_{h,k}\,u_{k,h} \qquad u_k = A^k v

    The sum runs in the coefficients' precision (float32 at least) and is rounded once, so a small
    coefficient is not lost beside a large one when the tokens are bfloat16 or float16.

    Args:
        coeffs: ``(H, m+1)`` or ``(m+1,)``.
        powers: ``m+1`` tensors ``(..., H, N, D)``; the last one decides the output's dtype.
        in_one_go: let the kernel that adds the last term also round the sum, which saves a launch.
            Only for plain tensors of one shape that are neither differentiated nor traced.
        exclusive: the share a, ``(H,)`` or a number: each token subtracts its own ``a·p`` from c0
            (:func:`own_share`); needs the first power, ``A·v``.
    """
    if powers[-1].is_nested:
        like: Any = powers[-1]
        # (H, all tokens, D): the batch and its lengths are one axis there
        total = combine(coeffs, [power.values() for power in powers], exclusive=exclusive)
        return torch.nested.nested_tensor_from_jagged(
            total, like.offsets(), jagged_dim=2, min_seqlen=None, max_seqlen=None
        )
    identity, *columns = columns_of(coeffs)
    if exclusive is not None:
        identity = identity - own_share(exclusive, powers[1], powers[0])
    # without a power of A, v may have a head for several heads of coefficients
    total = identity * repeat_heads(powers[0], identity)
    for place, column in enumerate(columns, 1):
        # torch promotes to a float32 sum of bfloat16 tokens
        out = torch.empty_like(powers[-1]) if in_one_go and place == len(columns) else None
        total = torch.addcmul(total, column, powers[place], out=out)
    return total.to(powers[-1].dtype)


def own_share(share: Tensor, mixed: Tensor, v: Tensor) -> Tensor:
    r"""How much of its own value each token takes out of what it gathered, ``(..., H, N, 1)``.

    .. math:: a\,p_i, \qquad p_i = \langle (A v)_i, v_i \rangle / \langle v_i, v_i \rangle

    p is 0 for a token whose v has the square norm 0, or one that is not finite: it keeps ``A·v``.

    Args:
        share: a, ``(H,)`` or a number for all heads.
        mixed: ``A·v``, with as many heads as v.
    """
    dtype = at_least_float32(torch.promote_types(mixed.dtype, v.dtype))
    mixed, v = mixed.to(dtype), v.to(dtype)
    square = (v * v).sum(-1, keepdim=True)
    has_direction = (square > 0) & (square < torch.inf)
    # filled before the division, so that no NaN enters the gradient either
    p = (mixed * v).sum(-1, keepdim=True) / square.masked_fill(~has_direction, 1.0)
    return (share[:, None, None] if share.dim() else share) * p.masked_fill(~has_direction, 0.0)


def columns_of(coeffs: Tensor) -> tuple[Tensor, ...]:
    """A column for each power, ``(H, 1, 1)`` or ``(1, 1)``, to multiply ``(..., H, N, D)`` with."""
    # never a scalar: torch would round it to the dtype of the tokens beside it
    return coeffs.view(*coeffs.shape, 1, 1).unbind(-3)


class Operator(ABC):
    """The attention map ``A`` of one layer, ``apply(x) = A·x``.

    Only :class:`~gfsa.operators.dense.DenseOperator` has to build the n×n matrix.
    """

    #: whether the tokens that come with it have been through a filter's ``mix_values`` already
    values_are_mixed = False
    #: whether the operator holds its matrix, so that :meth:`dense` costs nothing
    holds_matrix = False
    #: whether :meth:`polynomial` multiplies by the map H and keeps it, for gradients through it
    keeps_map = False
    map: Tensor | None = None

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """``A·x`` for tokens ``x`` of shape ``(..., H, N, D)``."""

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        """``[v, A·v, …, A^degree·v]``, one pass per power."""
        tokens = [v]
        for _ in range(degree):
            tokens.append(self.apply(tokens[-1]))
        # A·v has a head for each query head, v perhaps fewer
        return [repeat_heads(v, tokens[-1]), *tokens[1:]]

    def further(self, power: Tensor, count: int) -> list[Tensor]:
        """A power of A on v, and ``count`` passes more."""
        return self.powers(power, count)

    def polynomial(
        self, coeffs: Tensor | Coefficients, v: Tensor, exclusive: Tensor | None = None
    ) -> Tensor:
        r"""``Σ_k coeffs[..., k]·A^k·v``, with as many passes as the polynomial has degrees.

        The powers are combined at the end rather than nested as Horner would: ``A·v`` can be cached
        while decoding, and no intermediate sum is rounded to the tokens' dtype.

        Args:
            coeffs: ``(H, m+1)`` or ``(m+1,)``, or a filter's :class:`Coefficients`; an operator
                that overrides this method gets them as a tensor from :func:`value_of`.
            v: ``(..., H, N, D)``.
            exclusive: the share a of ``A·v`` along v to take out, ``(H,)`` or a number:
                ``Σ_k coeffs[..., k]·A^k·v − a·p·v`` with p as in :func:`own_share`.
        """
        coeffs = value_of(coeffs)
        if exclusive is not None and coeffs.shape[-1] == 1:
            # the share is one of A·v
            coeffs = torch.nn.functional.pad(coeffs, (0, 1))
        return combine(coeffs, self.powers(v, coeffs.shape[-1] - 1), exclusive=exclusive)

    def second_pass(self, heads: Sequence[int]) -> Operator | None:
        """The operator of ``heads`` alone, whose :meth:`further` continues their powers.

        None if this operator cannot be split by head; every head then does every pass.
        """
        return None

    def whole(self) -> Operator:
        """The map of all tokens; of an operator with a cache, the one inside, without the cache."""
        return self

    def visibility(self) -> Visibility | None:
        """Which keys each query may attend to, as the operator's masks say; None if unknown."""
        return None

    def dense(self) -> Tensor:
        """``A`` itself, ``(..., H, N, N)``; for looking at it, not for speed."""
        raise TypeError(
            f"{type(self).__name__} never builds its n×n matrix; "
            "build a gfsa.operators.DenseOperator from the same queries and keys to look at it"
        )


class FunctionOperator(Operator):
    """An operator given as a function ``x -> A·x``, such as another library's attention kernel.

    Args:
        apply: takes tokens ``x``, ``(..., H, N, D)``, and returns A·x in the same shape.
    """

    def __init__(self, apply: Callable[[Tensor], Tensor]) -> None:
        self._apply = apply

    def apply(self, x: Tensor) -> Tensor:
        return self._apply(x)


def repeat_heads(x: Tensor, like: Tensor) -> Tensor:
    """Give ``x`` as many heads as ``like`` by repeating each of them (grouped-query attention)."""
    shape, wanted = x.shape, like.shape
    if len(shape) < 3 or len(wanted) < 3 or shape[-3] >= wanted[-3]:
        return x
    return x.repeat_interleave(wanted[-3] // shape[-3], dim=-3)


def take_heads(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of ``x (..., H, N, D)``, a view of neighbours; one head for all stays."""
    if x.dim() < 3 or x.shape[-3] == 1:
        return x
    parts = [x.narrow(-3, start, length) for start, length in runs_of(heads)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -3)


def runs_of(heads: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours together: where each run of ``heads`` starts, and how many there are in it."""
    runs: list[tuple[int, int]] = []
    for head in heads:
        if runs and head == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((head, 1))
    return runs


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The precision in which sums over tokens in ``dtype`` are kept."""
    return torch.promote_types(dtype, torch.float32)
