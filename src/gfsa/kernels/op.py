"""The filter as one torch operator, for autograd, ``torch.compile`` and CUDA graphs.

Degrees 1 and 2 and the exclusive term are arguments of it. Each route (``routes.py``) has

- a forward, ``Inputs → (out, U, LSE)``: the filter, ``A·V``, and each row's natural logsumexp
  ``(B, H, N)``. Degree 1 in one pass ``keeps`` U for the exclusive term alone, and logsumexps as
  its gradient takes them.
- a gradient, ``(g, saved, options) → (dq, dk, dv, dc)``, with the gradients of the coefficients,
  and then of the share, as partial sums ``(H, columns, any number)``.

Filters around torch's attention have an operator of their own (``degree_one.py``): torch
differentiates its attention itself.
"""

# no postponed annotations here: the operator's schema is read from them
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gfsa.kernels import coefficients, hopper, short, sweep, two_pass
from gfsa.kernels.degree_one import combine_degree_one
from gfsa.kernels.launching import (
    Forward,
    Gradients,
    Inputs,
    Options,
    Saved,
    empty_like,
    needs_registered_operator,
)
from gfsa.kernels.routes import (
    OPERATION,
    Decision,
    Kernels,
    kernels_of,
    operation_of,
    situation_of_kernels,
    with_contiguous_rows,
)
from gfsa.operators.call import AttentionCall
from gfsa.operators.operator import Coefficients, Operator
from gfsa.operators.sdpa import SDPAOperator
from gfsa.operators.visibility import Visibility

# the functions of the routes' names
FORWARD: dict[str, Callable[[Inputs], Forward]] = {
    "short": short.forward,
    "sweep": sweep.forward,
    "two_pass": two_pass.forward,
    "one_sweep": sweep.forward_once,
}
GRADIENT: dict[str, Callable[[Tensor, Saved, Options], Gradients]] = {
    "short": short.backward,
    "hopper": hopper.backward,
    "two_pass": two_pass.backward,
    "hopper once": hopper.backward_once,
}
ONCE = "one_sweep"


def filter_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor | Coefficients,
    mask: Tensor | None,
    seed: Tensor | None,
    options: Options,
    kernels: Kernels | None = None,
    once: bool = False,
    share: Tensor | None = None,
) -> Tensor:
    """``c0·V + c1·A·V + c2·A²·V`` by the fused kernels.

    Args:
        q: ``(B, H, N, D)``; k, v: ``(B, H / group, N, D)``.
        coeffs: ``(H, 2 or 3)``, float32; or a filter's coefficients, in eager mode only and if
            :func:`~gfsa.kernels.coefficients.takes` accepts them.
        mask: bool, broadcastable to ``(B, H, N, N)``, True takes part; or spans with causality,
            see :func:`~gfsa.kernels.launching.are_spans`.
        seed: int64, one number, needed with dropout.
        kernels: the routes of this call, if they are decided already, in eager mode only.
        once: degree 1 in one pass, where a mask can only be spans.
        share: of the exclusive term, ``(H,)``, float32; degree 1 alone.
    """
    learned = coeffs if isinstance(coeffs, Coefficients) else None
    numbers: Any = coeffs if learned is None else learned.theta
    if kernels is None:
        # the registered operator costs several times the kernels' own launches on short sequences;
        # only the compiler and modes that record what runs need it
        if learned is None and needs_registered_operator(q):
            keeps = torch.is_grad_enabled()
            return forward(q, k, v, numbers, share, mask, seed, *options[:3], once, keeps)[0]
        kernels = kernels_for(q, mask, options, once)
    given = q, k, v, numbers, share, mask, seed, (learned, options, kernels)
    if torch.is_grad_enabled():
        return _Filter.apply(*given)
    return _run(given, False)[0]


def kernels_for(
    q: Tensor, mask: Tensor | None, options: Options, once: bool = False, grad: bool | None = None
) -> Kernels:
    """The routes of a call; in one pass, the kernel of any length beyond what was measured."""
    situation = situation_of_kernels(q, mask, *options[:4], degree=1 if once else 2)
    found = kernels_of(situation if grad is None else situation._replace(grad=grad))
    return found if not once or found.forward == ONCE else Kernels(ONCE, "hopper")


# q, k, v, the coefficients or θ, the share, mask and seed; then a filter's coefficients if θ is
# given, the options and the routes, as one argument: autograd inspects each of them
Given = tuple[Any, ...]


def _run(given: Given, keeps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(out, U, LSE)`` and the coefficients."""
    q, k, v, numbers, share, mask, seed, (learned, options, (route, *_)) = given
    share = None if share is None else share.contiguous()
    coeffs = coefficients.columns(numbers, learned, 2 if route == ONCE else 3)
    return *run_forward(route, q, k, v, coeffs, mask, seed, options, keeps, share), coeffs


def run_forward(route: str, *given: Any) -> Forward:
    """A route's forward on :class:`Inputs` of any layout."""
    return FORWARD[route](Inputs(*given))


def run_backward(gradient: str, g: Tensor, saved: Saved, options: Options) -> Gradients:
    """A gradient on tensors of any layout."""
    if saved.lse.dim() == 4:
        gradient = "hopper once"
    return GRADIENT[gradient](g, saved, options)


class _Filter(torch.autograd.Function):
    """The filter for autograd in eager mode, bypassing torch's dispatcher.

    ``numbers`` are the tensor we differentiate: the coefficients, or θ if they are learned.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        q, k, v, numbers, share, mask, seed, (learned, ctx.options, kernels) = given
        ctx.gradient = kernels.gradient
        ctx.basis = None if learned is None else learned.basis
        ctx.powers = numbers.shape[1] if learned is None else learned.base.shape[1]
        out, u, lse, coeffs = _run(given, True)
        # the gradient of the exclusive term reads A·V in place of the output
        read = out if share is None else u
        ctx.save_for_backward(q, k, v, u, read, lse, coeffs, mask, seed, share)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # a second derivative is asked for: once_differentiable raises
            return _Filter._backward_once(ctx, g)
        return _Filter._backward(ctx, g)

    @staticmethod
    def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved, needed = Saved(*ctx.saved_tensors), ctx.needs_input_grad
        options = ctx.options
        if not (needed[3] or needed[4]):
            options = options._replace(sums=False)
        dq, dk, dv, parts = run_backward(ctx.gradient, g, saved, options)
        dc, dshare = coefficients.gradients(parts, ctx.basis, ctx.powers, needed[3], needed[4])
        return dq, dk, dv, dc, dshare, None, None, None

    _backward_once = staticmethod(once_differentiable(_backward))


@torch.library.custom_op("gfsa::filter_attention", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    share: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    is_causal: bool,
    dropout_p: float,
    once: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The registered operator: ``(out, U, LSE)``.

    Args:
        keeps: whether there will be a gradient.
    """
    options = Options(scale, is_causal, dropout_p, share is not None)
    kernels = kernels_for(q, mask, options, once)
    return _run((q, k, v, coeffs, share, mask, seed, (None, options, kernels)), keeps)[:3]


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
    share: Tensor | None,
    scale: float,
    is_causal: bool,
    dropout_p: float,
    once: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and, if ``sums``, the coefficients and the share."""
    options = Options(scale, is_causal, dropout_p, share is not None, sums)
    # autograd is off while it runs a gradient
    gradient = kernels_for(q, mask, options, once, grad=True).gradient
    columns = coefficients.columns(coeffs, None, 2 if once else 3)
    saved = Saved(q, k, v, u, out, lse, columns, mask, seed, share)
    dq, dk, dv, parts = run_backward(gradient, g, saved, options)
    wanted = sums, sums and share is not None
    found = coefficients.gradients(parts, None, coeffs.shape[1], *wanted)
    dc, dshare = (parts.new_empty(0) if x is None else x for x in found)
    return dq, dk, dv, dc, dshare


@forward.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    share, once, keeps = rest[3], *rest[-2:]
    if once:
        rooms = sweep.kept(q, share is not None and keeps)
        return empty_like(q), rooms["u"](), rooms["lse"]()
    return empty_like(q), empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    coeffs, share, sums = rest[3], rest[6], rest[-1]
    tokens = empty_like(q), empty_like(k), empty_like(v)
    dshare = coeffs.new_empty(share.shape if sums and share is not None else 0)
    return *tokens, coeffs.new_empty(coeffs.shape if sums else 0), dshare


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, coeffs, share, mask, seed, *ctx.options, _ = inputs
    out, u, lse = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(u, lse)
    read = out if share is None else u
    ctx.save_for_backward(q, k, v, u, read, lse, coeffs, mask, seed, share)


def _differentiate(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 12
    sums = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    *tokens, dc, dshare = backward(g, *ctx.saved_tensors, *ctx.options, sums)
    return (*tokens, *(x if x.numel() else None for x in (dc, dshare)), *(None,) * 7)


forward.register_autograd(_differentiate, setup_context=_save)


def _by_head(numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Numbers in float32, for each head if there is one for all."""
    numbers = numbers.float()
    return numbers if numbers.dim() == len(shape) else numbers.expand(shape)


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
        q, k, options = self.call.q, self.call.k, self.options
        registered = needs_registered_operator(q)
        if isinstance(coeffs, Coefficients):
            if registered or not coefficients.takes(coeffs):
                return self.polynomial(coeffs.value(), v, exclusive)
            powers = coeffs.base.shape[1]
        else:
            coeffs = _by_head(coeffs, (q.shape[1], -1))
            powers = coeffs.shape[1]
        if exclusive is not None:
            exclusive = _by_head(exclusive, (q.shape[1],))
            options = options._replace(exclusive=True)
        operation, kernels = self._decided(powers - 1, options, registered)
        if operation == "around":
            return combine_degree_one(v, self.apply(v), coeffs, exclusive)
        seed = None
        if options.dropout_p:
            # drawn on the device, so that each replay of a captured graph draws a new one
            seed = torch.randint(2**32, (1,), device=q.device)
        once = operation == "once"
        return filter_attention(q, k, v, coeffs, self.mask, seed, options, kernels, once, exclusive)

    def _decided(
        self, degree: int, options: Options, registered: bool
    ) -> tuple[str, Kernels | None]:
        """The operation, and its kernels unless the ``registered`` operation chooses them."""
        decision = self.decision
        if registered and degree == 2:
            return "filter", None
        if decision is not None and not registered:
            return OPERATION[decision.route], Kernels(decision.route, decision.gradient)
        situation = situation_of_kernels(self.call.q, self.mask, *options[:4], degree)
        if registered:
            return operation_of(situation), None
        kernels = kernels_of(situation)
        return OPERATION[kernels.forward], kernels

    def visibility(self) -> Visibility:
        return Visibility.from_call(self.call)
