r"""Filters of degree 1 around torch's attention: ``c0·V + c1·U`` with ``U = A·V``.

.. math::
    dU = c_1 g, \qquad dV = \sum_{heads} c_0 g, \qquad
    dc_0 = \sum \langle g, V\rangle, \quad dc_1 = \sum \langle g, U\rangle

With the exclusive term, row by row, :math:`-a p v` with :math:`p = \langle u, v \rangle / s`,
:math:`s = \langle v, v \rangle` and :math:`t = \langle g, v \rangle`:

.. math::
    du \mathrel{-}= a \frac{t}{s} v, \qquad
    dv \mathrel{-}= a p\,g + a \frac{t}{s} (u - 2 p v), \qquad da = -\sum p\,t

One launch each way, where torch takes a dozen. U is torch's own, with its own gradient, so every
mask, dropout and kernel of torch's serves here too; nothing is saved that torch does not save.
Heads that share one of V are added up in the launch: V is not repeated, nor is dV.
"""

# no postponed annotations here: the operator's schema is read from them
import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gfsa.kernels import coefficients, elementwise
from gfsa.kernels.autograd import needs_registered_operator
from gfsa.kernels.launcher import Kernel, Launch, on_device_of
from gfsa.kernels.layout import copyable_by_tile, empty_like
from gfsa.kernels.problem import padded
from gfsa.kernels.tile_access import describe
from gfsa.operators.base import Coefficients

ROWS = 64
# the gradient of heads that share V keeps tiles of V and dV in registers, the exclusive term V
GROUPED_ROWS = 32


def combine_degree_one(
    v: Tensor, u: Tensor, coeffs: Tensor | Coefficients, exclusive: bool = False
) -> Tensor:
    """``c0·V + c1·U``, with an exclusive term if the third column of ``coeffs`` is its share.

    Args:
        v: ``(B, H / group, N, D)``; u: ``(B, H, N, D)``.
        coeffs: ``(H, 2)``, float32; or a filter's coefficients, in eager mode only and if
            :func:`~gfsa.kernels.coefficients.takes` accepts them.
    """
    learned: Coefficients | None = None
    if isinstance(coeffs, Coefficients):
        learned, numbers = coeffs, coeffs.theta
    else:
        numbers = coeffs
    if learned is None and needs_registered_operator(u):
        return forward(v, u, numbers, exclusive)
    if torch.is_grad_enabled():
        return _Combine.apply(v, u, numbers, learned, exclusive)
    return _run(v, u, numbers if learned is None else coefficients.evaluate(learned), exclusive)


def _run(v: Tensor, u: Tensor, coeffs: Tensor, exclusive: bool) -> Tensor:
    v, u, coeffs = copyable_by_tile(v), copyable_by_tile(u), coeffs.contiguous()
    out = empty_like(u)
    launch = _launch(
        *("combine_degree_one", u.shape, v.shape[1], coeffs.shape[1], u.dtype, u.device, exclusive)
    )
    with on_device_of(u):
        launch((v, u, out), coeffs)
    return out


def _run_backward(
    g: Tensor, v: Tensor, u: Tensor, coeffs: Tensor, exclusive: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of v and u, and partial sums of the coefficients' ``(H, 2 or 3, any number)``."""
    # hooks on saved tensors may return them in another layout
    g, v, u, coeffs = *(copyable_by_tile(x) for x in (g, v, u)), coeffs.contiguous()
    dv, du = empty_like(v), empty_like(u)
    with on_device_of(u):
        parts = launch_gradient(g, v, u, dv, du, coeffs, exclusive)
    return dv, du, parts


def launch_gradient(
    g: Tensor, v: Tensor, u: Tensor, dv: Tensor, du: Tensor, coeffs: Tensor, exclusive: bool
) -> Tensor:
    """Write ``dv`` and ``du``; returns partial sums of the coefficients' gradients."""
    launch = _launch(
        *("grad_degree_one", u.shape, v.shape[1], coeffs.shape[1], u.dtype, u.device, exclusive)
    )
    parts = coeffs.new_empty(u.shape[1], 2 + exclusive, u.shape[0] * launch.grid[0])
    launch((g, v, u, dv, du), coeffs, parts)
    return parts


class _Combine(torch.autograd.Function):
    """The combination for autograd in eager mode, bypassing torch's dispatcher.

    ``numbers`` are the tensor we differentiate: the coefficients, or θ if they are learned.
    """

    @staticmethod
    def forward(
        ctx: Any,
        v: Tensor,
        u: Tensor,
        numbers: Tensor,
        learned: Coefficients | None,
        exclusive: bool,
    ) -> Tensor:
        coeffs = numbers if learned is None else coefficients.evaluate(learned)
        ctx.basis = None if learned is None else learned.basis
        ctx.exclusive = exclusive
        ctx.save_for_backward(v, u, coeffs)
        return _run(v, u, coeffs, exclusive)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dv, du, parts = _run_backward(g, *ctx.saved_tensors, ctx.exclusive)
        return dv, du, coefficients.gradient(parts, ctx.basis), None, None


@torch.library.custom_op("gfsa::degree_one", mutates_args=())
def forward(v: Tensor, u: Tensor, coeffs: Tensor, exclusive: bool) -> Tensor:
    """The registered operator."""
    return _run(v, u, coeffs, exclusive)


@torch.library.custom_op("gfsa::degree_one_backward", mutates_args=())
def backward(
    g: Tensor, v: Tensor, u: Tensor, coeffs: Tensor, exclusive: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of v, u and the coefficients."""
    dv, du, parts = _run_backward(g, v, u, coeffs, exclusive)
    return dv, du, coefficients.total(parts)


@forward.register_fake
def _(v: Tensor, u: Tensor, coeffs: Tensor, exclusive: bool) -> Tensor:
    return empty_like(u)


@backward.register_fake
def _(
    g: Tensor, v: Tensor, u: Tensor, coeffs: Tensor, exclusive: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(v), empty_like(u), coeffs.new_empty(coeffs.shape[0], 2 + exclusive)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.exclusive = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    return (*backward(g, *ctx.saved_tensors, ctx.exclusive), None)


forward.register_autograd(_differentiate, setup_context=_save)


# kernels, and how many tensors each of them takes
_KERNELS = {
    "combine_degree_one": (Kernel(elementwise.combine_degree_one, describe), 3),
    "grad_degree_one": (Kernel(elementwise.grad_degree_one, describe), 5),
}


@functools.lru_cache(maxsize=1024)
def _launch(
    name: str,
    shape: torch.Size,
    key_heads: int,
    powers: int,
    dtype: torch.dtype,
    device: torch.device,
    exclusive: bool,
) -> Launch:
    kernel, tensors = _KERNELS[name]
    batch, heads, length, head_dim = shape
    width, group = padded(head_dim), heads // key_heads
    is_gradient = name == "grad_degree_one"
    rows = GROUPED_ROWS if exclusive or (is_gradient and group > 1) else ROWS
    # as many numbers in registers whatever the head dim
    rows = rows * 128 // max(width, 128)
    return Launch(
        kernel,
        (-(-length // rows), batch * (key_heads if is_gradient else heads), 1),
        (device, dtype),
        [(1, 1, rows, width)] * tensors,
        (heads,),
        (rows, width, powers, group, exclusive),
        num_warps=4,
    )
