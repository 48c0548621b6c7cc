"""The filter of degree 1 in one pass as a torch operator, for autograd and ``torch.compile``."""

# no postponed annotations here: the operator's schema is read from them
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gfsa.kernels import coefficients
from gfsa.kernels import degree_one_launch as one_pass
from gfsa.kernels import degree_one_wide as wide
from gfsa.kernels.autograd import needs_registered_operator
from gfsa.kernels.hopper import degree_one_path as hopper
from gfsa.kernels.launcher import on_device_of
from gfsa.kernels.layout import copyable_by_tile, empty_like
from gfsa.kernels.problem import Options
from gfsa.kernels.routes import Kernels, keeps_first_power, kernels_of, situation_of_kernels
from gfsa.kernels.sweep import degree_one_path as sweep
from gfsa.operators.base import Coefficients

# the functions of the routes' names
FORWARD: dict[str, Any] = {"one_sweep": sweep.forward, "one_pass": one_pass.forward}
GRADIENT: dict[str, Any] = {"hopper": hopper.backward, "cudnn": wide.backward}


def filter_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor | Coefficients,
    mask: Tensor | None,
    options: Options,
    kernels: Kernels | None = None,
) -> Tensor:
    """``c0·V + c1·A·V`` in one pass.

    Args:
        q: ``(B, H, N, D)``; k, v: ``(B, H / group, N, D)``.
        coeffs: ``(H, 2)``, float32; or a filter's coefficients, in eager mode only and if
            :func:`~gfsa.kernels.coefficients.takes` accepts them.
        mask: spans with causality, see :func:`~gfsa.kernels.problem.are_spans`; or None.
        kernels: the routes of this call, if they are decided already.
    """
    learned: Coefficients | None = None
    if isinstance(coeffs, Coefficients):
        learned, numbers = coeffs, coeffs.theta
    else:
        numbers = coeffs
    if learned is None and needs_registered_operator(q):
        keeps = keeps_first_power(situation_of_kernels(q, mask, *options, degree=1))
        return forward(q, k, v, numbers, mask, options.is_causal, options.scale, keeps)[0]
    if kernels is None:
        kernels = kernels_of(situation_of_kernels(q, mask, *options, degree=1))
    # without a gradient to come, A·V is neither written nor kept
    keeps = kernels.gradient == "cudnn"
    if torch.is_grad_enabled():
        settings = (learned, options, kernels.forward, keeps)
        return _FilterOnce.apply(q, k, v, numbers, mask, settings)
    values = numbers if learned is None else coefficients.evaluate(learned)
    return _run(q, k, v, values, mask, options, kernels.forward, keeps)[0]


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    options: Options,
    route: str,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, U, LSE)``: the filter, ``A·V``, and each row's logsumexp.

    Args:
        keeps: for cuDNN's gradient: U is saved and logsumexps are natural, ``(B, H, N)``. Without
            it U is empty, and logsumexps are to base 2, ``(B, H, 1, N or more)``.
    """
    q, k, v = copyable_by_tile(q), copyable_by_tile(k), copyable_by_tile(v)
    u = empty_like(q) if keeps else q.new_empty(0)
    lse = q.new_empty(statistics_shape(q, keeps), dtype=torch.float32)
    with on_device_of(q):
        kept = u if keeps else None
        out = FORWARD[route](q, k, v, coeffs.contiguous(), mask, options, lse, kept)
    return out, u, lse


def statistics_shape(q: Tensor, keeps: bool) -> tuple[int, ...]:
    """The shape of logsumexps."""
    batch, heads, length, _ = q.shape
    if keeps:
        return batch, heads, length
    return batch, heads, 1, (length + 15) // 16 * 16


def _run_backward(
    g: Tensor, saved: tuple[Any, ...], options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # hooks on saved tensors may return them in another layout
    q, k, v, out = [copyable_by_tile(x) for x in saved[:4]]
    u, lse, coeffs, mask = saved[4:]
    lse, coeffs, g = _copyable_numbers(lse), coeffs.contiguous(), copyable_by_tile(g)
    gradient = "hopper"
    if u.numel():
        u, gradient = copyable_by_tile(u), "cudnn"
    with on_device_of(q):
        found: tuple[Tensor, Tensor, Tensor, Tensor] = GRADIENT[gradient](
            g, q, k, v, out, u, lse, coeffs, mask, options
        )
    return found


def _copyable_numbers(x: Tensor) -> Tensor:
    """Logsumexps, contiguous and from where the copy engine takes them."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


class _FilterOnce(torch.autograd.Function):
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
        settings: tuple[Coefficients | None, Options, str, bool],
    ) -> Tensor:
        # settings are one argument: autograd inspects each of them
        learned, options, route, keeps = settings
        coeffs = numbers if learned is None else coefficients.evaluate(learned)
        ctx.basis = None if learned is None else learned.basis
        ctx.options = options
        out, u, lse = _run(q, k, v, coeffs, mask, options, route, keeps)
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
    options = Options(scale, is_causal)
    route = kernels_of(situation_of_kernels(q, mask, *options, degree=1)).forward
    return _run(q, k, v, coeffs, mask, options, route, keeps)


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
    lse = q.new_empty(statistics_shape(q, keeps), dtype=torch.float32)
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
