"""The filter of degree 1 in one pass as a torch operator, for autograd and ``torch.compile``."""

# no postponed annotations here: the operator's schema is read from them
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gfsa.kernels import coefficients, eligibility
from gfsa.kernels import degree_one_launch as one_pass
from gfsa.kernels.autograd import needs_registered_operator
from gfsa.kernels.launcher import on_device_of
from gfsa.kernels.layout import copyable_by_tile, empty_like
from gfsa.kernels.problem import Options
from gfsa.operators.base import Coefficients


def filter_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor | Coefficients,
    mask: Tensor | None,
    options: Options,
) -> Tensor:
    """``c0·V + c1·A·V`` in one pass, if :func:`.eligibility.refusal_by_one_pass` has no reason.

    Args:
        q: ``(B, H, N, D)``; k, v: ``(B, H / group, N, D)``.
        coeffs: ``(H, 2)``, float32; or a filter's coefficients, in eager mode only and if
            :func:`~gfsa.kernels.coefficients.takes` accepts them.
        mask: bool, broadcastable to ``(B, 1, 1, N)``, True takes part; or spans with causality, see
            :func:`~gfsa.kernels.problem.are_spans`.
    """
    learned: Coefficients | None = None
    if isinstance(coeffs, Coefficients):
        learned, numbers = coeffs, coeffs.theta
    else:
        numbers = coeffs
    # without a gradient to come, A·V is neither written nor kept
    keeps = torch.is_grad_enabled() and eligibility.leaves_gradient_to_cudnn(q, mask)
    if learned is None and needs_registered_operator(q):
        return forward(q, k, v, numbers, mask, options.is_causal, options.scale, keeps)[0]
    if torch.is_grad_enabled():
        return _FilterOnce.apply(q, k, v, numbers, mask, (learned, options, keeps))
    values = numbers if learned is None else coefficients.evaluate(learned)
    return _run(q, k, v, values, mask, options, keeps)[0]


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    options: Options,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, U, LSE)``, of which U is empty where the gradient has no need of it."""
    q, k, v = copyable_by_tile(q), copyable_by_tile(k), copyable_by_tile(v)
    with on_device_of(q):
        return one_pass.forward(q, k, v, coeffs.contiguous(), mask, options, keeps)


def _run_backward(
    g: Tensor, saved: tuple[Any, ...], options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # hooks on saved tensors may return them in another layout
    q, k, v, out = [copyable_by_tile(x) for x in saved[:4]]
    u, lse, coeffs, mask = saved[4:]
    lse, coeffs, g = _copyable_numbers(lse), coeffs.contiguous(), copyable_by_tile(g)
    u = copyable_by_tile(u) if u.numel() else u
    with on_device_of(q):
        return one_pass.backward(g, q, k, v, out, u, lse, coeffs, mask, options)


def _copyable_numbers(x: Tensor) -> Tensor:
    """Logsumexps, contiguous and from where the copy engine takes them."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


class _FilterOnce(torch.autograd.Function):
    """The filter for autograd in eager mode, bypassing torch's dispatcher.

    ``numbers``, of which the gradient is taken, are the coefficients, or θ of ``learned`` ones.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        numbers: Tensor,
        mask: Tensor | None,
        settings: tuple[Coefficients | None, Options, bool],
    ) -> Tensor:
        # settings are one argument: autograd inspects each of them
        learned, options, keeps = settings
        coeffs = numbers if learned is None else coefficients.evaluate(learned)
        ctx.basis = None if learned is None else learned.basis
        ctx.options = options
        out, u, lse = _run(q, k, v, coeffs, mask, options, keeps)
        ctx.save_for_backward(q, k, v, out, u, lse, coeffs, mask)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv, parts = _run_backward(g, ctx.saved_tensors, ctx.options)
        return dq, dk, dv, coefficients.gradient(parts, ctx.basis), None, None


@torch.library.custom_op("gfsa::filter_once", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The registered operator: ``(out, U, LSE)``."""
    return _run(q, k, v, coeffs, mask, Options(scale, is_causal), keeps)


@torch.library.custom_op("gfsa::filter_once_backward", mutates_args=())
def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    u: Tensor,
    lse: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the coefficients."""
    saved = (q, k, v, out, u, lse, coeffs, mask)
    dq, dk, dv, parts = _run_backward(g, saved, Options(scale, is_causal))
    return dq, dk, dv, coefficients.total(parts)


@forward.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    keeps = rest[-1]
    u = empty_like(q) if keeps else q.new_empty(0)
    lse = q.new_empty(one_pass.statistics_shape(q, keeps), dtype=torch.float32)
    return empty_like(q), u, lse


@backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    coeffs = rest[3]
    return empty_like(q), empty_like(k), empty_like(v), coeffs.new_empty(coeffs.shape[0], 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, coeffs, mask, *ctx.options, _ = inputs
    out, u, lse = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(u, lse)
    ctx.save_for_backward(q, k, v, out, u, lse, coeffs, mask)


def _differentiate(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 8
    gradients = backward(g, *ctx.saved_tensors, *ctx.options)
    return (*gradients, None, None, None, None)


forward.register_autograd(_differentiate, setup_context=_save)
