"""Softmax attention whose kernel is chosen call by call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.kernels import routes
from gfsa.operators.call import (
    AttentionCall,
    DecisionCache,
    DropoutPlace,
    autocast,
    check_call,
    check_coefficients,
    check_dropout_place,
    check_kinds,
    check_options,
    in_full_precision,
    no_autocast,
)
from gfsa.operators.dense import DenseOperator
from gfsa.operators.operator import PLAIN, Coefficients, Operator, value_of
from gfsa.operators.sdpa import SDPAOperator
from gfsa.operators.visibility import Visibility


class AttentionOperator(Operator):
    """What :func:`gfsa.graph_filter_attention` applies, for a filter: ``filter(operator, v)``.

    Shapes are checked when the operator is applied.

    Args:
        q, k, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend: as there.
        dropout_after: as in :class:`~gfsa.operators.DenseOperator`.
        visible: as in :class:`~gfsa.operators.AttentionCall`.
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
        backend: routes.Backend = "auto",
        dropout_after: DropoutPlace = "attention",
        visible: Visibility | None = None,
    ) -> None:
        if not (isinstance(q, Tensor) and isinstance(k, Tensor) and attn_mask is None):
            check_kinds(q=q, k=k, attn_mask=attn_mask)
        check_options(dropout_p, is_causal, scale, enable_gqa)
        if dropout_after != "attention":
            check_dropout_place(dropout_after)
        q, k, attn_mask = autocast(q, k, attn_mask)
        # the compiler's symbol for a comparison of lengths becomes a bool: torch takes no symbol
        causal = False
        if is_causal:
            causal = True
        self.call = AttentionCall(
            q, k, attn_mask, dropout_p, causal, scale, enable_gqa, dropout_after, visible
        )
        self.backend = backend

    def apply(self, x: Tensor) -> Tensor:
        # x may be a power of A on v, which has a head for each query head even if v has fewer
        (x,) = autocast(x)
        with no_autocast(x.device):
            return self._chosen(x, 1).apply(x)

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        check_kinds(v=v)
        (v,) = autocast(v)
        check_call(self.call, v)
        with no_autocast(v.device):
            return self._chosen(v, degree).powers(v, degree)

    def polynomial(
        self, coeffs: Tensor | Coefficients, v: Tensor, exclusive: Tensor | None = None
    ) -> Tensor:
        # a filter's coefficients have the shape and the dtype of its base
        like = coeffs.base if isinstance(coeffs, Coefficients) else coeffs
        if not (isinstance(v, Tensor) and isinstance(like, Tensor)):
            check_kinds(v=v, coeffs=like)
        (v,) = autocast(v)
        decision = self._decision(like, v, exclusive is not None)
        if decision.route not in ("sdpa", "dense"):
            # autocast does not act on these kernels
            return self._operator(decision).polynomial(coeffs, v, exclusive)
        with no_autocast(v.device):
            numbers = in_full_precision(value_of(coeffs))
            return self._operator(decision).polynomial(numbers, v, exclusive)

    def second_pass(self, heads: Sequence[int]) -> Operator | None:
        q, k = self.call.q, self.call.k
        # under dropout further passes drop the entries that the first one dropped, in every head
        if self.call.dropout_p:
            return None
        if q.is_cuda and not q.is_nested:
            saved = q.numel() // q.shape[-3] * (q.shape[-3] - len(heads))
            if 4 * saved * k.shape[-2] < _FLOPS_WORTH_A_CALL:
                return None
        return self.of_heads(heads)

    def of_heads(self, heads: Sequence[int]) -> Operator:
        """:meth:`second_pass`, whether it saves time or not; without dropout."""
        some = self.call.of_heads(heads)
        return AttentionOperator(
            *(some.q, some.k, some.attn_mask, 0.0, some.is_causal, some.scale),
            backend=self.backend,
            visible=some.visible,
        )

    def visibility(self) -> Visibility:
        return Visibility.from_call(self.call)

    def dense(self) -> Tensor:
        # the map before any dropout: a mask drawn here would differ from the one applied
        with no_autocast(self.call.q.device):
            return DenseOperator.from_call(self.call.without_dropout()).dense()

    def which(self, coeffs: Tensor, v: Tensor, exclusive: bool = False) -> routes.Decision:
        """What :meth:`polynomial` runs for these arguments, and why; computes nothing."""
        check_kinds(v=v, coeffs=coeffs)
        (v,) = autocast(v)
        return self._decision(coeffs, v, exclusive)

    def _decision(self, coeffs: Tensor, v: Tensor, exclusive: bool) -> routes.Decision:
        """The decision for such coefficients, all arguments checked."""
        call, signature = self.call, None
        if host_time_counts(call.q, call.k, v):
            # checking the same arguments again would take longer than a short kernel
            signature = self._signature(coeffs, v, exclusive)
            decision = _DECISIONS.get(signature)
            if decision is not None:
                return decision
        check_call(call, v)
        degree = check_coefficients(coeffs, call.q).shape[-1] - 1
        situation = routes.situation_of(call, v, degree, exclusive)
        decision = routes.decide(situation, self.backend)
        if signature is not None:
            _DECISIONS.remember(signature, decision)
        return decision

    def _signature(self, coeffs: Tensor, v: Tensor, exclusive: bool) -> tuple[object, ...]:
        """All that the checks and the decision depend on."""
        q, k, mask, *options, visible = self.call
        return (
            *(type(q), q.shape, q.dtype, q.device, k.shape, k.dtype, k.device),
            *(v.shape, v.dtype, v.device, coeffs.shape, coeffs.dtype, coeffs.device),
            None if mask is None else (mask.shape, mask.stride(), mask.dtype, mask.device),
            None if visible is None else visible.signature(),
            *(*options, self.backend, exclusive),
            *(F.scaled_dot_product_attention, torch.is_grad_enabled()),
            self.call.dropout_p and torch.cuda.is_current_stream_capturing(),
        )

    def _chosen(self, v: Tensor, degree: int) -> Operator:
        situation = routes.situation_of(self.call, v, degree, False)
        return self._operator(routes.decide(situation, self.backend))

    def _operator(self, decision: routes.Decision) -> Operator:
        if decision.route == "dense":
            return DenseOperator.from_call(self.call)
        if decision.route == "sdpa":
            return SDPAOperator(self.call)
        # triton is imported where its kernels run
        from gfsa.kernels.op import FusedOperator

        return FusedOperator(self.call.with_key_mask(), decision)


# below it the launches that splitting adds cost a GPU more than the work they save; a guess
_FLOPS_WORTH_A_CALL = 5e10

# decisions about calls on a GPU
_DECISIONS: DecisionCache[routes.Decision] = DecisionCache()


def host_time_counts(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether to save host time: on a GPU, outside of compilers, which ask only once."""
    if not q.is_cuda or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    # sizes of other kinds of tensors may be symbols
    plain = type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN
    return plain and not (q.is_nested or k.is_nested or v.is_nested)
