"""Tiles of a tensor ``(B, H, N, D)``, by the GPU's copy engine or by plain loads.

A kernel takes what :func:`describe` gives and calls :func:`load_tile` and :func:`store_tile`. GPUs
from compute capability 9.0 on get a descriptor of the copy engine (TMA). Older ones get the address
and strides: Triton could compute addresses from a descriptor there, but it would not see that a row
is contiguous, and would load number by number.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gfsa.kernels import routes
from gfsa.kernels.launcher import Block


def describe(x: Tensor, block: Block) -> Any:
    """A tensor as kernels take it, of a layout that ``copyable_by_tile`` gives."""
    if has_copy_engine(x):
        return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))
    return address_of(x)


def has_copy_engine(x: Tensor) -> bool:
    """Whether the tensor's GPU copies tiles by itself; Triton's interpreter does."""
    return not x.is_cuda or routes.capability(x.device)[0] >= 9


def address_of(x: Tensor) -> tuple[Any, ...]:
    """``(x, strides of sequences, heads and rows, rows, row length)``, in units of 16 bytes.

    Units tell the compiler that rows are aligned to 16 bytes, which is what it copies at a time.
    """
    unit = 16 // x.element_size()
    batch, head, row, _ = x.stride()
    return x, batch // unit, head // unit, row // unit, x.shape[2], x.shape[3] // unit


@triton.jit
def load_tile(tensor, b, h, row, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows ``row … row+ROWS`` of one head; rows beyond the tensor read as zero."""
    if not isinstance(tensor, tl.core.tensor_descriptor_base):
        at, there = _places(tensor, b, h, row, ROWS, D)
        tile = tl.load(at, mask=there, other=0.0)
    else:
        tile = tl.reshape(tensor.load([b, h, row, 0]), [ROWS, D])
    return tile


@triton.jit
def store_tile(tensor, tile, b, h, row, ROWS: tl.constexpr, D: tl.constexpr):
    """Write rows ``row … row+ROWS`` of one head; rows beyond the tensor are not written."""
    if not isinstance(tensor, tl.core.tensor_descriptor_base):
        at, there = _places(tensor, b, h, row, ROWS, D)
        tl.store(at, tile.to(at.dtype.element_ty), mask=there)
    else:
        tensor.store([b, h, row, 0], tl.reshape(tile.to(tensor.dtype), [1, 1, ROWS, D]))


@triton.jit
def _places(tensor, b, h, row, ROWS: tl.constexpr, D: tl.constexpr):
    """The addresses of a tile, and which of them are in the tensor."""
    base, stride_b, stride_h, stride_n, n, width = tensor
    UNIT: tl.constexpr = 128 // base.dtype.element_ty.primitive_bitwidth
    base += (b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h) * UNIT
    i = row + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    at = base + ((i.to(tl.int64) * stride_n * UNIT)[:, None] + d[None, :])
    return at, (i < n)[:, None] & (d < width * UNIT)[None, :]
