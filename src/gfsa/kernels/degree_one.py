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

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gfsa.kernels import coefficients
from gfsa.kernels.launching import (
    JIT_OPTIONS,
    Given,
    Kernel,
    Launch,
    Launches,
    Prepared,
    Tiles,
    load_tile,
    needs_registered_operator,
    padded,
    room,
    room_like,
    store_tile,
    tiles_of,
)
from gfsa.operators.operator import Coefficients, combine, repeat_heads


@triton.jit
def directed(v):
    """``v`` and ``⟨v, v⟩`` of each row; 0 and 1 where that is 0 or not finite."""
    square = tl.sum(v * v, 1)
    has_direction = (square > 0.0) & (square < float("inf"))
    return tl.where(has_direction[:, None], v, 0.0), tl.where(has_direction, square, 1.0)


@triton.jit
def own_part(u, v, share):
    """``a·p·v`` of each row, with ``p = ⟨u, v⟩ / ⟨v, v⟩``: what the exclusive term takes out."""
    v, square = directed(v)
    return (share * tl.sum(u * v, 1) / square)[:, None] * v


@triton.jit(**JIT_OPTIONS)
def combine_around(
    v_rows, u_rows, out_rows, coeffs, shares, heads,
    BM: tl.constexpr, D: tl.constexpr, POWERS: tl.constexpr, GROUP: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
):  # fmt: skip
    """``c0·V + c1·U``, EXCLUSIVE: without U's part along V; GROUP heads of U share one of V."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    row = tl.program_id(0) * BM
    v = load_tile(v_rows, b, h // GROUP, row, BM, D).to(tl.float32)
    u = load_tile(u_rows, b, h, row, BM, D).to(tl.float32)
    out = tl.load(coeffs + h * POWERS) * v + tl.load(coeffs + h * POWERS + 1) * u
    if EXCLUSIVE:
        out -= own_part(u, v, tl.load(shares + h))
    store_tile(out_rows, out, b, h, row, BM, D)


@triton.jit(**JIT_OPTIONS)
def grad_around(
    g_rows, v_rows, u_rows, dv_rows, du_rows, coeffs, shares, dc_out, heads,
    BM: tl.constexpr, D: tl.constexpr, POWERS: tl.constexpr, GROUP: tl.constexpr,
    EXCLUSIVE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """dV without attention's part, summed over the heads that share V; dU; these rows' part of dc.

    SUMS: whether dc is wanted. A program takes all heads that share one of V, so that V is read
    once and nothing is made for each of them that is added up later.
    """
    block, blocks = tl.program_id(0), tl.num_programs(0)
    b, key_head = tl.program_id(1) // (heads // GROUP), tl.program_id(1) % (heads // GROUP)
    row = block * BM
    v = load_tile(v_rows, b, key_head, row, BM, D).to(tl.float32)
    dv = tl.zeros((BM, D), tl.float32)
    COUNT: tl.constexpr = 3 if EXCLUSIVE else 2
    if EXCLUSIVE:
        own, square = directed(v)
    parts = tl.num_programs(1) // (heads // GROUP) * blocks
    for member in tl.range(0, GROUP, num_stages=2):
        h = key_head * GROUP + member
        g = load_tile(g_rows, b, h, row, BM, D).to(tl.float32)
        u = load_tile(u_rows, b, h, row, BM, D).to(tl.float32)
        dc = dc_out + h * COUNT * parts + b * blocks + block
        if SUMS:
            tl.store(dc, tl.sum(tl.sum(g * v, 1), 0))
            tl.store(dc + parts, tl.sum(tl.sum(g * u, 1), 0))
        dv += tl.load(coeffs + h * POWERS) * g
        du = tl.load(coeffs + h * POWERS + 1) * g
        if EXCLUSIVE:
            share = tl.load(shares + h)
            p = tl.sum(u * own, 1) / square
            along = tl.sum(g * own, 1)
            if SUMS:
                tl.store(dc + 2 * parts, -tl.sum(p * along, 0))
            weight = share * along / square
            du -= weight[:, None] * own
            dv -= (share * p)[:, None] * g + weight[:, None] * (u - (2.0 * p)[:, None] * own)
        store_tile(du_rows, du, b, h, row, BM, D)
    store_tile(dv_rows, dv, b, key_head, row, BM, D)


ROWS = 64
# the gradient of heads that share V keeps tiles of V and dV in registers, the exclusive term V
GROUPED_ROWS = 32


def combine_degree_one(
    v: Tensor, u: Tensor, coeffs: Tensor | Coefficients, share: Tensor | None = None
) -> Tensor:
    """``c0·V + c1·U``, with an exclusive term if there is a share.

    Args:
        v: ``(B, H / group, N, D)``; u: ``(B, H, N, D)``.
        coeffs: ``(H, 2)``, float32; or a filter's coefficients, in eager mode only and if
            :func:`~gfsa.kernels.coefficients.takes` accepts them.
        share: ``(H,)``, float32.
    """
    learned = coeffs if isinstance(coeffs, Coefficients) else None
    numbers: Any = coeffs if learned is None else learned.theta
    if learned is None and needs_registered_operator(u):
        # the compiler makes one kernel of it by itself
        return combine(numbers, [repeat_heads(v, u), u], exclusive=share)
    if torch.is_grad_enabled():
        return _Combine.apply(v, u, numbers, share, learned)
    return _combined(v, u, coefficients.columns(numbers, learned, 2), share)


def _combined(v: Tensor, u: Tensor, coeffs: Tensor, share: Tensor | None) -> Tensor:
    share = None if share is None else share.contiguous()
    return _COMBINE((u, v), (coeffs, share), None)


def _prepare(given: Given, sums: bool = True) -> Prepared:
    u, v, coeffs = given["u"], given["v"], given["coeffs"]
    exclusive = given["share"] is not None
    name = "grad_around" if "g" in given else "combine_around"
    launch = _launch(name, u.shape, v.shape[1], coeffs.shape[1], u.dtype, u.device, exclusive, sums)
    if name == "combine_around":
        return Prepared(given, {"out": room_like(u)}, [(launch, "v u out", "coeffs share")], "out")
    parts = u.shape[1], 2 + exclusive, u.shape[0] * launch.grid[0]
    # torch's attention gets a gradient laid out as g, as without a filter: torch 2.11 runs cuDNN's
    # gradient for the layout that it first saw, whatever the layout is now
    rooms = {"dv": room_like(v), "du": room_like(given["g"]), "parts": room(parts, coeffs)}
    return Prepared(given, rooms, [(launch, "g v u dv du", "coeffs share parts")], "dv du parts")


_COMBINE = Launches[Tensor](_prepare, "u v", "coeffs share")
_BACKWARD = Launches[tuple[Tensor, ...]](_prepare, "u v g", "coeffs share")


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
        share: Tensor | None,
        learned: Coefficients | None,
    ) -> Tensor:
        coeffs = coefficients.columns(numbers, learned, 2)
        ctx.basis = None if learned is None else learned.basis
        ctx.save_for_backward(v, u, coeffs, share)
        return _combined(v, u, coeffs, share)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        v, u, coeffs, share = ctx.saved_tensors
        # hooks on saved tensors may return them in another layout
        numbers = coeffs.contiguous(), None if share is None else share.contiguous()
        needed = ctx.needs_input_grad
        dv, du, parts = _BACKWARD((u, v, g), numbers, None, needed[2] or needed[3])
        return dv, du, *coefficients.gradients(parts, ctx.basis, 2, needed[2], needed[3]), None


_KERNELS = {"combine_around": Kernel(combine_around), "grad_around": Kernel(grad_around)}


def _launch(
    name: str,
    shape: torch.Size,
    key_heads: int,
    powers: int,
    dtype: torch.dtype,
    device: torch.device,
    exclusive: bool,
    sums: bool = True,
) -> Launch:
    kernel = _KERNELS[name]
    batch, heads, length, head_dim = shape
    width, group = padded(head_dim), heads // key_heads
    is_gradient = name == "grad_around"
    rows = GROUPED_ROWS if exclusive or (is_gradient and group > 1) else ROWS
    # as many numbers in registers whatever the head dim
    rows = rows * 128 // max(width, 128)
    return Launch(
        kernel,
        (-(-length // rows), batch * (key_heads if is_gradient else heads), 1),
        (device, dtype),
        tiles_of(kernel, Tiles(rows, rows, 4), width),
        (heads,),
        (rows, width, powers, group, exclusive, *([sums] if is_gradient else [])),
        num_warps=4,
    )
