"""The filter of degree 2 as a torch operator, for autograd, ``torch.compile`` and CUDA graphs.

Every route has a forward that gives and saves the same tensors, so any gradient may follow it:

- ``forward(q, k, v, coeffs, mask, seed, options) → (out, U, LSE)``: the filter, ``A·V``, and each
  row's natural logsumexp ``(B, H, N)``. Tokens and masks are as in :func:`filter_attention`,
  ``coeffs`` are contiguous.
- ``backward(g, saved, options) → (dq, dk, dv, dc)``, with the coefficients' gradient as partial
  sums ``(H, 3, any number)``.
"""

# no postponed annotations here: the operator's schema is read from them
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gfsa.kernels import coefficients, hopper, short, sweep, two_pass
from gfsa.kernels.degree_one import combine_degree_one
from gfsa.kernels.launching import (
    Options,
    Saved,
    copyable_by_tile,
    empty_like,
    needs_registered_operator,
    on_device_of,
)
from gfsa.kernels.one_pass import filter_once
from gfsa.kernels.routes import (
    OPERATION,
    Decision,
    Kernels,
    kernels_of,
    operation_of,
    situation_of_kernels,
    with_contiguous_rows,
)
from gfsa.kernels.short import prepared_for
from gfsa.operators.base import Coefficients, Operator
from gfsa.operators.call import AttentionCall
from gfsa.operators.sdpa import SDPAOperator
from gfsa.operators.visibility import Visibility

# the functions of the routes' names
FORWARD = {"short": short.forward, "sweep": sweep.forward, "two_pass": two_pass.forward}
GRADIENT = {"short": short.backward, "hopper": hopper.backward, "two_pass": two_pass.backward}


def filter_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor | Coefficients,
    mask: Tensor | None,
    seed: Tensor | None,
    options: Options,
    kernels: Kernels | None = None,
) -> Tensor:
    """``c0·V + c1·A·V + c2·A²·V`` by the fused kernels.

    Args:
        q: ``(B, H, N, D)``; k, v: ``(B, H / group, N, D)``.
        coeffs: ``(H, 3)``, float32; or a filter's coefficients, in eager mode only and if
            :func:`~gfsa.kernels.coefficients.takes` accepts them.
        mask: bool, broadcastable to ``(B, H, N, N)``, True takes part; or spans with causality,
            see :func:`~gfsa.kernels.launching.are_spans`.
        seed: int64, one number, needed with dropout.
        kernels: the routes of this call, if they are decided already.
    """
    learned: Coefficients | None = None
    if isinstance(coeffs, Coefficients):
        learned, numbers = coeffs, coeffs.theta
    else:
        numbers = coeffs
    # the registered operator costs several times the kernels' own launches on short sequences;
    # only the compiler and modes that record what runs need it
    if learned is None and needs_registered_operator(q):
        scale, is_causal, dropout_p, _ = options
        return forward(q, k, v, numbers, mask, seed, dropout_p, is_causal, scale)[0]
    if torch.is_grad_enabled():
        settings = (learned, options, kernels or kernels_for(q, mask, options))
        return _Filter.apply(q, k, v, numbers, mask, seed, settings)
    values = numbers if learned is None else coefficients.evaluate(learned)
    return _run(q, k, v, values, mask, seed, options, kernels)[0]


def kernels_for(q: Tensor, mask: Tensor | None, options: Options) -> Kernels:
    """The routes of a call."""
    return kernels_of(situation_of_kernels(q, mask, *options, degree=2))


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    options: Options,
    kernels: Kernels | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, U, LSE)``."""
    route = (kernels or kernels_for(q, mask, options)).forward
    prepared = prepared_for(q, k, v, mask, options) if route == "short" else None
    if prepared is not None:
        return prepared.forward(q, k, v, coeffs.contiguous(), mask, seed)
    return run_forward(route, q, k, v, coeffs, mask, seed, options)


def run_forward(
    route: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """A route's forward on tensors of any layout, on their device."""
    q, k, v = copyable_by_tile(q), copyable_by_tile(k), copyable_by_tile(v)
    with on_device_of(q):
        return FORWARD[route](q, k, v, coeffs.contiguous(), mask, seed, options)


def run_backward(
    gradient: str, g: Tensor, saved: Saved, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A gradient on tensors of any layout, on their device."""
    # hooks on saved tensors may return them in another layout
    q, k, v, u, out = [copyable_by_tile(x) for x in saved[:5]]
    lse, coeffs, mask, seed = saved[5:]
    saved = Saved(q, k, v, u, out, lse, coeffs.contiguous(), mask, seed)
    with on_device_of(q):
        return GRADIENT[gradient](copyable_by_tile(g), saved, options)


class _Filter(torch.autograd.Function):
    """The filter for autograd in eager mode, bypassing torch's dispatcher.

    ``numbers`` are the tensor we differentiate: the coefficients, or θ if they are learned.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        numbers: Tensor,
        mask: Tensor | None,
        seed: Tensor | None,
        settings: tuple[Coefficients | None, Options, Kernels],
    ) -> Tensor:
        # settings are one argument: autograd inspects each of them
        learned, options, kernels = settings
        coeffs = numbers if learned is None else coefficients.evaluate(learned)
        ctx.basis = None if learned is None else learned.basis
        ctx.options, ctx.gradient = options, kernels.gradient
        short_route = kernels.forward == "short"
        ctx.prepared = prepared = prepared_for(q, k, v, mask, options) if short_route else None
        if prepared is not None:
            coeffs = coeffs.contiguous()
            out, u, lse = prepared.forward(q, k, v, coeffs, mask, seed)
        else:
            out, u, lse = run_forward(kernels.forward, q, k, v, coeffs, mask, seed, options)
        ctx.save_for_backward(q, k, v, u, out, lse, coeffs, mask, seed)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # a second derivative is asked for: once_differentiable raises
            return _Filter._backward_once(ctx, g)
        return _Filter._backward(ctx, g)

    @staticmethod
    def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved, gradients = Saved(*ctx.saved_tensors), None
        if ctx.prepared is not None:
            gradients = ctx.prepared.backward(g, saved)
        if gradients is None:
            gradients = run_backward(ctx.gradient, g, saved, ctx.options)
        dq, dk, dv, parts = gradients
        return dq, dk, dv, coefficients.gradient(parts, ctx.basis), None, None, None

    _backward_once = staticmethod(once_differentiable(_backward))


@torch.library.custom_op("gfsa::filter_attention", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The registered operator: ``(out, U, LSE)``."""
    return _run(q, k, v, coeffs, mask, seed, Options(scale, is_causal, dropout_p))


@torch.library.custom_op("gfsa::filter_attention_backward", mutates_args=())
def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    out: Tensor,
    lse: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the coefficients."""
    options = Options(scale, is_causal, dropout_p)
    # autograd is off while it runs a gradient
    situation = situation_of_kernels(q, mask, *options, degree=2)._replace(grad=True)
    saved = Saved(q, k, v, u, out, lse, coeffs, mask, seed)
    dq, dk, dv, parts = run_backward(kernels_of(situation).gradient, g, saved, options)
    return dq, dk, dv, coefficients.total(parts)


@forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(q), empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    coeffs = rest[3]
    return empty_like(q), empty_like(k), empty_like(v), coeffs.new_empty(coeffs.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, coeffs, mask, seed, *ctx.options = inputs
    out, u, lse = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(u, lse)
    ctx.save_for_backward(q, k, v, u, out, lse, coeffs, mask, seed)


def _differentiate(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 9
    gradients = backward(g, *ctx.saved_tensors, *ctx.options)
    return (*gradients, None, None, None, None, None)


forward.register_autograd(_differentiate, setup_context=_save)


class FusedOperator(Operator):
    r"""``c0·V + c1·A·V + c2·A·(A·V)`` by the library's own GPU kernels, forward and backward.

    The second pass reuses the first one's logsumexp and combines the powers. No n×n tensor is
    made; besides what attention saves for its backward pass, ``A·V`` is saved.

    Which kernels run is decided in ``routes.py``. A filter of degree 1 is one pass with the
    combination at its end, which saves nothing more than attention, or the kernels of degree 2 with
    c2 = 0, or torch's attention with one launch each way around it.

    Single passes, :meth:`apply` and :meth:`powers`, are torch's own attention.

    Args:
        decision: the decision about this call, if it is made already.
    """

    def __init__(self, call: AttentionCall, decision: Decision | None = None) -> None:
        q, mask, scale = call.q, call.attn_mask, call.scale
        self.call = call
        self.decision = decision
        is_causal = call.is_causal
        if call.visible is not None:
            # routes lets causal windows and documents through alone
            mask, is_causal = call.visible.spans(q.shape[-2], q.device), True
        elif mask is not None:
            mask = with_contiguous_rows(mask, q.shape[-2])
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

    def polynomial(
        self, coeffs: Tensor | Coefficients, v: Tensor, exclusive: Tensor | None = None
    ) -> Tensor:
        q, k = self.call.q, self.call.k
        if isinstance(coeffs, Coefficients):
            taken = exclusive is None and coefficients.takes(coeffs)
            if needs_registered_operator(q) or not taken:
                return self.polynomial(coeffs.value(), v, exclusive)
            powers = coeffs.base.shape[1]
        else:
            if coeffs.dim() == 1:
                coeffs = coeffs.expand(q.shape[1], -1)
            if coeffs.dtype != torch.float32:
                coeffs = coeffs.float()
            powers = coeffs.shape[1]
            if exclusive is not None:
                share = exclusive.float().expand(q.shape[1])
                coeffs = torch.cat((coeffs, share[:, None]), 1)
        options = self.options._replace(exclusive=exclusive is not None)
        operation, kernels = self._decided(powers - 1, options)
        if operation == "once":
            return filter_once(q, k, v, coeffs, self.mask, options, kernels)
        if operation == "around":
            return combine_degree_one(v, self.apply(v), coeffs, options.exclusive)
        if powers == 2 and not isinstance(coeffs, Coefficients):
            coeffs = torch.nn.functional.pad(coeffs, (0, 1))
        seed = None
        if self.options.dropout_p:
            # drawn on the device, so that each replay of a captured graph draws a new one
            seed = torch.randint(2**32, (1,), device=q.device)
        return filter_attention(q, k, v, coeffs, self.mask, seed, self.options, kernels)

    def _decided(self, degree: int, options: Options) -> tuple[str, Kernels | None]:
        """The operation, and its kernels unless the operation chooses them when it runs."""
        decision = self.decision
        q, mask = self.call.q, self.mask
        if needs_registered_operator(q):
            if degree == 2:
                return "filter", None
            return operation_of(situation_of_kernels(q, mask, *options, degree)), None
        if decision is None:
            kernels = kernels_of(situation_of_kernels(q, mask, *options, degree))
        else:
            kernels = Kernels(decision.route, decision.gradient)
        return OPERATION[kernels.forward], kernels

    def visibility(self) -> Visibility:
        return Visibility.from_call(self.call)
