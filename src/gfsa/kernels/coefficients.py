r"""A filter's coefficients from its learned numbers, and the gradient back: a launch each way.

.. math:: c = base + θ·basis, \qquad dθ = dc·basis^\top

In eager mode these few numbers take half a dozen launches of torch's, each as long as attention
itself on short sequences.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from gfsa.kernels.launching import JIT_OPTIONS, Kernel, Launch, on_device_of, padded
from gfsa.operators.operator import Coefficients


@triton.jit(**JIT_OPTIONS)
def add_parts(parts_in, total_out, parts, BLOCK: tl.constexpr):
    """The sum of one row of partial sums."""
    row = tl.program_id(0)
    parts_in += row.to(tl.int64) * parts
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(parts_in + at, mask=at < parts, other=0.0)
    tl.store(total_out + row, tl.sum(total, 0))


@triton.jit(**JIT_OPTIONS)
def fold(
    theta, base, basis, coeffs, heads,
    L: tl.constexpr, ROWS: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """``c = base + θ·basis``, all heads in one program; missing powers are zero."""
    h = tl.arange(0, ROWS)
    there = h < heads
    for power in tl.static_range(3):
        c = tl.zeros((ROWS,), tl.float32)
        if power < POWERS:
            for learned in tl.static_range(L):
                c += tl.load(theta + h * L + learned, mask=there, other=0.0) * tl.load(
                    basis + learned * POWERS + power
                )
            c += tl.load(base + h * POWERS + power, mask=there, other=0.0)
        tl.store(coeffs + h * 3 + power, c, mask=there)


@triton.jit(**JIT_OPTIONS)
def unfold(
    dc, basis, dtheta, parts,
    L: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    POWERS: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """``dθ = dc·basisᵀ`` of one head; the parts of its dc have ``GIVEN`` powers."""
    h = tl.program_id(0)
    dc += h.to(tl.int64) * GIVEN * parts
    power = tl.arange(0, 4)
    total = tl.zeros((4, BLOCK), tl.float32)
    for start in range(0, parts, BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = (power < POWERS)[:, None] & (at < parts)[None, :]
        total += tl.load(dc + power[:, None] * parts + at[None, :], mask=there, other=0.0)
    learned = tl.arange(0, LANES)
    there = (learned < L)[:, None] & (power < POWERS)[None, :]
    rows = tl.load(basis + learned[:, None] * POWERS + power[None, :], mask=there, other=0.0)
    dtheta_h = tl.sum(rows * tl.sum(total, 1)[None, :], 1)
    tl.store(dtheta + h * L + learned, dtheta_h, mask=learned < L)


# one program adds up as many partial sums; torch adds up more
MOST_PARTS = 16384
BLOCK = 4096


def takes(coeffs: Coefficients) -> bool:
    """Whether these kernels can read the numbers as they are: 2 or 3 powers, one basis for all."""
    theta, base, basis, _ = coeffs
    if not theta.dtype == base.dtype == basis.dtype == torch.float32 or basis.dim() != 2:
        return False
    return theta.is_contiguous() and base.is_contiguous() and basis.is_contiguous()


def evaluate(coeffs: Coefficients) -> Tensor:
    """``c`` as ``(H, 3)``, the third column zero for a filter of degree 1."""
    theta, base, basis, _ = coeffs
    return _folded(theta, base, basis, theta.shape[1])


def _folded(theta: Tensor, base: Tensor, basis: Tensor, learned: int) -> Tensor:
    heads, powers = base.shape
    values = theta.new_empty(heads, 3)
    launch = _fold(theta.device.index, heads, learned, powers)
    on_device_of(theta, launch, (), theta, base, basis, values)
    return values


def columns(numbers: Tensor, learned: Coefficients | None, count: int) -> Tensor:
    """The coefficients as kernels read them, ``(H, count or more)``.

    Args:
        numbers: ``c``, unless θ is learned.
    """
    if learned is not None:
        return evaluate(learned)
    numbers = numbers.contiguous()
    if numbers.shape[1] < count:
        # one launch, where torch takes two; nothing is learned, so θ and its basis are not read
        return _folded(numbers, numbers, numbers, 0)
    return numbers


def gradients(
    parts: Tensor, basis: Tensor | None, powers: int, of_numbers: bool, of_share: bool
) -> tuple[Tensor | None, Tensor | None]:
    """``dθ``, or ``dc`` if there is no basis, and the share's, each if it is wanted.

    Args:
        parts: partial sums ``(H, powers or more, any number)`` of dc, then of the share's gradient.
        basis: ``(L, powers)``.
    """
    dnumbers = dshare = None
    if of_numbers and basis is not None:
        dnumbers, of_numbers = _of_theta(parts, basis), False
    if of_numbers or of_share:
        sums = total(parts)
        if of_share:
            # with one head both would be views of one tensor, which an operator may not return
            dshare = sums[:, powers].clone()
        if of_numbers:
            dnumbers = sums[:, :powers].contiguous()
    return dnumbers, dshare


def _of_theta(parts: Tensor, basis: Tensor) -> Tensor:
    """``dθ``; columns that the basis lacks are left out."""
    heads, given, number = parts.shape
    if number > MOST_PARTS:
        parts, number = total(parts), 1
    learned, powers = basis.shape
    dtheta = parts.new_empty(heads, learned)
    launch = _unfold(parts.device.index, heads, learned, number, powers, given)
    on_device_of(parts, launch, (), parts, basis, dtheta)
    return dtheta


def total(parts: Tensor) -> Tensor:
    """``dc`` from its partial sums, ``(H, m+1, any number)``."""
    heads, powers, number = parts.shape
    if number > MOST_PARTS:
        return parts.sum(2)
    dc = parts.new_empty(heads, powers)
    # torch's own sum takes three times as long: a fifth of what attention on 128 tokens takes
    launch = _add_parts(parts.device.index, heads * powers, number)
    on_device_of(parts, launch, (), parts, dc)
    return dc


@functools.lru_cache(maxsize=1024)
def _add_parts(device: int | None, sums: int, parts: int) -> Launch:
    constants = (min(BLOCK, padded(parts)),)
    return Launch(_ADD_PARTS, (sums, 1, 1), (device,), (), (parts,), constants, num_warps=4)


@functools.lru_cache(maxsize=1024)
def _fold(device: int | None, heads: int, learned: int, powers: int) -> Launch:
    grid, constants = (1, 1, 1), (learned, padded(heads), powers)
    return Launch(_FOLD, grid, (device,), (), (heads,), constants, num_warps=1)


@functools.lru_cache(maxsize=1024)
def _unfold(
    device: int | None, heads: int, learned: int, parts: int, powers: int, given: int
) -> Launch:
    grid = (heads, 1, 1)
    constants = (learned, padded(learned), min(BLOCK, padded(parts)), powers, given)
    return Launch(_UNFOLD, grid, (device,), (), (parts,), constants, num_warps=8)


_ADD_PARTS = Kernel(add_parts)
_FOLD = Kernel(fold)
_UNFOLD = Kernel(unfold)
