"""Softmax attention whose kernel is chosen call by call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.operators.autocast import autocast, no_autocast
from gfsa.operators.base import PLAIN, Operator, take_heads, worth_taking_apart
from gfsa.operators.call import (
    check_coefficients,
    check_kinds,
    check_options,
    check_tokens,
    in_full_precision,
)
from gfsa.operators.choice import Backend, Call, Choice, choose
from gfsa.operators.dense import DenseOperator, DropoutPlace, check_dropout_place, repeat_heads
from gfsa.operators.sdpa import SDPAOperator


class AttentionOperator(Operator):
    """Softmax attention whose kernel is chosen call by call.

    The operator that :func:`graph_filter_attention` applies, for callers that hand an operator to
    a filter: ``filter(AttentionOperator(q, k), v)``. Arguments as there, and ``dropout_after``
    as in :class:`~gfsa.operators.DenseOperator`.
    """

    # some of the kernels do
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
        backend: Backend = "auto",
        dropout_after: DropoutPlace = "attention",
    ) -> None:
        if not (isinstance(q, Tensor) and isinstance(k, Tensor) and attn_mask is None):
            check_kinds(q=q, k=k, attn_mask=attn_mask)
        check_options(dropout_p, is_causal, scale, enable_gqa)
        self.q, self.k, self.attn_mask = autocast(q, k, attn_mask)
        self.dropout_p = dropout_p
        self.is_causal = is_causal
        self.scale = scale
        self.enable_gqa = enable_gqa
        self.backend = backend
        self.dropout_after = check_dropout_place(dropout_after)

    def apply(self, x: Tensor) -> Tensor:
        # x may be a power of A on v, which has a head for each query head whatever v has
        (x,) = autocast(x)
        with no_autocast(x.device):
            return self._chosen(x, 1).apply(x)

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        v = self._prepare(v)
        with no_autocast(v.device):
            return self._chosen(v, degree).powers(v, degree)

    def polynomial(self, coeffs: Tensor, v: Tensor) -> Tensor:
        check_kinds(v=v, coeffs=coeffs)
        (v,) = autocast(v)
        choice, settled = self._choice(coeffs, v), in_full_precision(coeffs)
        if choice.backend == "fused":
            # whose kernels autocast does not know
            return self._fused().polynomial(settled, v)
        with no_autocast(v.device):
            return self._operator(choice).polynomial(settled, v)

    def affine(self, theta: Tensor, base: Tensor, basis: Tensor, v: Tensor) -> Tensor:
        check_kinds(v=v)
        (v,) = autocast(v)
        choice = self._choice(base, v)
        if choice.backend == "fused":
            return self._fused().affine(theta, base, basis, v)
        with no_autocast(v.device):
            return self._operator(choice).affine(theta, base, basis, v)

    def _choice(self, coeffs: Tensor, v: Tensor) -> Choice:
        """The choice for such coefficients, arguments checked."""
        # a kernel takes microseconds: there, looking at the same arguments again is what takes time
        signature = self._signature(coeffs, v) if _launches_are_short(self.q, self.k, v) else None
        choice = None if signature is None else _CHOICES.get(signature)
        if choice is None:
            self._check(v)
            choice = self._choose(v, check_coefficients(coeffs, self.q).shape[-1] - 1)
            if signature is not None:
                _remember(signature, choice)
        return choice

    def second_pass(self, heads: Sequence[int]) -> Operator | None:
        if self.dropout_p:
            # further passes drop what the first one dropped, in every head
            return None
        if not worth_taking_apart(self.q, self.k, len(heads)):
            return None
        return AttentionOperator(
            take_heads(self.q, heads),
            take_heads(repeat_heads(self.k, self.q), heads),
            None if self.attn_mask is None else take_heads(self.attn_mask, heads),
            is_causal=self.is_causal,
            scale=self.scale,
            backend=self.backend,
        )

    def dense(self) -> Tensor:
        # the map before any dropout: drawing a mask here would be another than the one applied
        with no_autocast(self.q.device):
            return DenseOperator.from_qk(
                self.q, self.k, self.attn_mask, self.is_causal, self.scale
            ).dense()

    def which(self, coeffs: Tensor, v: Tensor) -> Choice:
        """What :meth:`polynomial` runs for these arguments, and why; computes nothing."""
        v = self._prepare(v)
        return self._choose(v, check_coefficients(coeffs, self.q).shape[-1] - 1)

    def _prepare(self, v: Tensor) -> Tensor:
        check_kinds(v=v)
        (v,) = autocast(v)
        self._check(v)
        return v

    def _check(self, v: Tensor) -> None:
        check_tokens(self.q, self.k, v, self.attn_mask, self.dropout_p, self.enable_gqa)

    def _signature(self, coeffs: Tensor, v: Tensor) -> tuple[Any, ...]:
        """All that the checks and the choice of an operator depend on."""
        q, k, mask = self.q, self.k, self.attn_mask
        return (
            *(type(q), q.shape, q.dtype, q.device),
            *(k.shape, k.dtype, v.shape, v.dtype, coeffs.shape, coeffs.dtype, coeffs.device),
            None if mask is None else (mask.shape, mask.stride(), mask.dtype),
            *(self.dropout_p, self.is_causal, self.scale, self.enable_gqa),
            *(self.backend, self.dropout_after),
            *(F.scaled_dot_product_attention, torch.is_grad_enabled()),
            self.dropout_p and torch.cuda.is_current_stream_capturing(),
        )

    def _choose(self, v: Tensor, degree: int) -> Choice:
        call = Call(
            self.q,
            self.k,
            v,
            self.attn_mask,
            self.dropout_p,
            self.is_causal,
            degree,
            self.dropout_after,
        )
        return choose(self.backend, call)

    def _chosen(self, v: Tensor, degree: int) -> Operator:
        return self._operator(self._choose(v, degree))

    def _operator(self, choice: Choice) -> Operator:
        if choice.backend == "dense":
            return self._dense()
        return self._fused() if choice.backend == "fused" else self._sdpa()

    def _fused(self) -> Operator:
        # Triton is imported where its kernels run
        from gfsa.operators.fused.operator import FusedOperator

        return FusedOperator(
            self.q,
            self.k,
            self.attn_mask,
            self.dropout_p,
            self.is_causal,
            self.scale,
            self.enable_gqa,
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

    def _dense(self) -> DenseOperator:
        return DenseOperator.from_qk(
            self.q,
            self.k,
            self.attn_mask,
            self.is_causal,
            self.scale,
            dropout_p=self.dropout_p,
            dropout_after=self.dropout_after,
        )


# choices for calls on a GPU, which follow from their signatures
_CHOICES: dict[tuple[Any, ...], Choice] = {}
_MOST_CHOICES = 4096


def _remember(signature: tuple[Any, ...], choice: Choice) -> None:
    if len(_CHOICES) >= _MOST_CHOICES:
        # lengths that never come again; what is in use is found out once more
        _CHOICES.clear()
    _CHOICES[signature] = choice


def _launches_are_short(*tokens: Tensor) -> bool:
    """Whether the host's time counts: on a GPU, outside of a compiler, which asks but once."""
    if not tokens[0].is_cuda or torch.compiler.is_compiling():
        return False
    # sizes of other kinds of tensors may be symbols
    others = [x for x in tokens if type(x) not in PLAIN or x.is_nested]
    return not others
