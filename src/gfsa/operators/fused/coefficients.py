"""A filter's coefficients from its learned numbers, and the gradient back: a launch each way.

.. math:: c = base + θ·basis, \\qquad dθ = dc·basis^\\top

In eager mode these few numbers take half a dozen launches of torch's, each as long as attention
itself is on short sequences.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from gfsa.operators.fused import elementwise
from gfsa.operators.fused.launcher import Kernel, Launch, launch_beside
from gfsa.operators.fused.long.launch import padded

# as many partial sums are added up by one program; more are torch's job
MOST_PARTS = 16384
BLOCK = 4096


class Affine(NamedTuple):
    """What is constant in ``c = base + θ·basis``, float32, for m+1 = 2 or 3 powers.

    Args:
        base: ``(H, m+1)``.
        basis: ``(L, m+1)``.
    """

    base: Tensor
    basis: Tensor


def takes(theta: Tensor, base: Tensor, basis: Tensor) -> bool:
    """Whether these kernels can read the numbers as they are."""
    if not theta.dtype == base.dtype == basis.dtype == torch.float32:
        return False
    return theta.is_contiguous() and base.is_contiguous() and basis.is_contiguous()


def forward(theta: Tensor, affine: Affine) -> Tensor:
    """``c``, ``(H, 3)`` whatever the degree."""
    heads, learned = theta.shape
    coeffs = theta.new_empty(heads, 3)
    fold = _fold(theta.device.index, heads, learned, affine.base.shape[1])
    launch_beside(theta, fold, (), theta, *affine, coeffs)
    return coeffs


def backward(parts: Tensor, affine: Affine) -> Tensor:
    """``dθ`` from the parts of dc, ``(H, m+1 or more, any number)``."""
    heads, given, number = parts.shape
    if number > MOST_PARTS:
        parts, number = total(parts), 1
    learned, powers = affine.basis.shape
    dtheta = parts.new_empty(heads, learned)
    unfold = _unfold(parts.device.index, heads, learned, number, powers, given)
    launch_beside(parts, unfold, (), parts, affine.basis, dtheta)
    return dtheta


def total(parts: Tensor) -> Tensor:
    """``dc`` from its parts, ``(H, m+1, any number)``."""
    heads, powers, number = parts.shape
    if number > MOST_PARTS:
        return parts.sum(2)
    dc = parts.new_empty(heads, powers)
    # torch's own sum takes three times as long: a fifth of what attention on 128 tokens takes
    add = _add_parts(parts.device.index, heads * powers, number)
    launch_beside(parts, add, (), parts, dc)
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


_ADD_PARTS = Kernel(elementwise.add_parts)
_FOLD = Kernel(elementwise.fold)
_UNFOLD = Kernel(elementwise.unfold)
