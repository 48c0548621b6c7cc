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
from gfsa.operators.fused.kernel import Kernel, Launch
from gfsa.operators.fused.passes import padded

# as many partial sums of one head are added up by one program; more are torch's job
MOST_PARTS = 16384
BLOCK = 1024


class Affine(NamedTuple):
    """What is constant in ``c = base + θ·basis``: ``(H, 3)`` and ``(L, 3)``, float32."""

    base: Tensor
    basis: Tensor


def takes(theta: Tensor, base: Tensor, basis: Tensor) -> bool:
    """Whether these kernels can read the numbers as they are."""
    return all(x.dtype == torch.float32 and x.is_contiguous() for x in (theta, base, basis))


def forward(theta: Tensor, affine: Affine) -> Tensor:
    """``c``, ``(H, 3)``."""
    heads, learned = theta.shape
    coeffs = torch.empty_like(affine.base)
    _fold(theta.device.index, heads, learned)((), theta, *affine, coeffs)
    return coeffs


def backward(parts: Tensor, affine: Affine) -> Tensor:
    """``dθ`` from the parts of dc, ``(H, 3, any number)``."""
    heads, _, number = parts.shape
    if number > MOST_PARTS:
        parts, number = parts.sum(2), 1
    learned = affine.basis.shape[0]
    dtheta = parts.new_empty(heads, learned)
    _unfold(parts.device.index, heads, learned, number)((), parts, affine.basis, dtheta)
    return dtheta


@functools.lru_cache(maxsize=1024)
def _fold(device: int | None, heads: int, learned: int) -> Launch:
    grid, rows = (1, 1, 1), padded(heads)
    return Launch(_FOLD, grid, (device,), (), (heads,), (learned, rows), num_warps=1)


@functools.lru_cache(maxsize=1024)
def _unfold(device: int | None, heads: int, learned: int, parts: int) -> Launch:
    grid, block = (heads, 1, 1), min(BLOCK, padded(parts))
    return Launch(_UNFOLD, grid, (device,), (), (parts,), (learned, block), num_warps=4)


_FOLD = Kernel(elementwise.fold)
_UNFOLD = Kernel(elementwise.unfold)
