"""Filters of degree one around torch's attention: ``c0·V + c1·U`` with ``U = A·V``.

.. math::
    dU = c_1 g, \\qquad dV = c_0 g, \\qquad
    dc_0 = \\sum \\langle g, V\\rangle, \\quad dc_1 = \\sum \\langle g, U\\rangle

A launch each way, where torch takes a dozen. U is torch's own, with its own gradient, so whatever
mask, dropout and kernel torch has serve here too; nothing is kept that it does not keep.
"""

# no postponed annotations here: the operator's schema is read from them
import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gfsa.operators.fused import coefficients, elementwise
from gfsa.operators.fused.autograd import must_be_seen
from gfsa.operators.fused.coefficients import Affine
from gfsa.operators.fused.launcher import Kernel, Launch, copyable_by_tile, empty_like, on_device_of
from gfsa.operators.fused.long.launch import padded

ROWS = 64


def weigh(v: Tensor, u: Tensor, coeffs: Tensor) -> Tensor:
    """``c0·V + c1·U``.

    Args:
        v, u: ``(B, H, N, D)``.
        coeffs: ``(H, 2)``, float32.
    """
    if must_be_seen(u):
        return forward(v, u, coeffs)
    if torch.is_grad_enabled():
        return _Weigh.apply(v, u, coeffs, None)
    return _forward(v, u, coeffs)


def affine_weigh(v: Tensor, u: Tensor, theta: Tensor, affine: Affine) -> Tensor:
    """The same with coefficients ``base + θ·basis``, and the gradient of θ, in eager mode."""
    if torch.is_grad_enabled():
        return _Weigh.apply(v, u, theta, affine)
    return _forward(v, u, coefficients.forward(theta, affine))


def _forward(v: Tensor, u: Tensor, coeffs: Tensor) -> Tensor:
    v, u, coeffs = copyable_by_tile(v), copyable_by_tile(u), coeffs.contiguous()
    out = empty_like(u)
    with on_device_of(u):
        _launch("weigh", u.shape, coeffs.shape[1], u.dtype, u.device)((v, u, out), coeffs)
    return out


def _run_backward(g: Tensor, v: Tensor, u: Tensor, coeffs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of v and u, and parts of the coefficients' ``(H, 2, any number)``."""
    # hooks on saved tensors may give them back in another layout
    g, v, u, coeffs = *(copyable_by_tile(x) for x in (g, v, u)), coeffs.contiguous()
    launch = _launch("grad_weigh", u.shape, coeffs.shape[1], u.dtype, u.device)
    dv, du = empty_like(v), empty_like(u)
    parts = coeffs.new_empty(u.shape[1], 2, u.shape[0] * launch.grid[0])
    with on_device_of(u):
        launch((g, v, u, dv, du), coeffs, parts)
    return dv, du, parts


def _backward(g: Tensor, v: Tensor, u: Tensor, coeffs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of v, u and the coefficients."""
    dv, du, parts = _run_backward(g, v, u, coeffs)
    return dv, du, coefficients.total(parts)


class _Weigh(torch.autograd.Function):
    """The same past torch's dispatcher, of coefficients or of what they are made from."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, u: Tensor, numbers: Tensor, affine: Affine | None) -> Tensor:
        coeffs = numbers if affine is None else coefficients.forward(numbers, affine)
        ctx.affine = affine
        ctx.save_for_backward(v, u, coeffs)
        return _forward(v, u, coeffs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        affine, (v, u, coeffs) = ctx.affine, ctx.saved_tensors
        dv, du, parts = _run_backward(g, v, u, coeffs)
        dnumbers = (
            coefficients.total(parts) if affine is None else coefficients.backward(parts, affine)
        )
        return dv, du, dnumbers, None


forward = torch.library.custom_op("gfsa::weigh", _forward, mutates_args=())
backward = torch.library.custom_op("gfsa::weigh_backward", _backward, mutates_args=())


@forward.register_fake
def _(v: Tensor, u: Tensor, coeffs: Tensor) -> Tensor:
    return empty_like(u)


@backward.register_fake
def _(g: Tensor, v: Tensor, u: Tensor, coeffs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(v), empty_like(u), coeffs.new_empty(coeffs.shape[0], 2)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = backward(g, *ctx.saved_tensors)
    return gradients


forward.register_autograd(_differentiate, setup_context=_keep)


# kernels, and how many tensors each one takes
_KERNELS = {
    "weigh": (Kernel(elementwise.weigh), 3),
    "grad_weigh": (Kernel(elementwise.grad_weigh), 5),
}


@functools.lru_cache(maxsize=1024)
def _launch(
    name: str, shape: torch.Size, powers: int, dtype: torch.dtype, device: torch.device
) -> Launch:
    kernel, tensors = _KERNELS[name]
    batch, heads, length, head_dim = shape
    width = padded(head_dim)
    return Launch(
        kernel,
        (-(-length // ROWS), batch * heads, 1),
        (device, dtype),
        [(1, 1, ROWS, width)] * tensors,
        (heads,),
        (ROWS, width, powers),
        num_warps=4,
    )
