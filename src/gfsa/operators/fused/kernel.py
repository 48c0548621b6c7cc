"""Launching a kernel with little ado: what the host does once a call is small."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

Grid = tuple[int, int, int]


class Kernel:
    """A Triton kernel, compiled once for each variant and then launched directly.

    Triton's own launcher looks at every argument again in each call to find the compiled code
    that fits; for a kernel of a few microseconds that costs more than the kernel. Here the caller
    names the variant: everything that the compiled code depends on beside the constants.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: Grid,
        variant: tuple[Any, ...],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        **options: Any,
    ) -> None:
        key = (torch.cuda.current_device() if torch.cuda.is_available() else -1, variant, constants)
        compiled = self.compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments, *constants)
            return
        compiled = self.function[grid](*arguments, *constants, **options)
        # triton's interpreter compiles nothing
        if compiled is not None:
            self.compiled[key] = compiled


def variant(q: Tensor, k: Tensor) -> tuple[Any, ...]:
    """What compiled code depends on: Triton tells lengths by their divisibility, and ones apart."""
    length = q.shape[2]
    return q.dtype, length % 16 == 0, length == 1, q.shape[1] == k.shape[1]


def descriptor(kind: Any, x: Tensor, block: tuple[int, ...]) -> Any:
    """A descriptor of ``x`` whose checks :func:`copyable_by_tile` has made already."""
    made = kind.__new__(kind)
    made.base = x
    made.shape = x.shape
    made.strides = x.stride()
    made.block_shape = block
    made.padding = "zero"
    return made


def tiles_of(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """``x`` of shape ``(B, H, N, D)``, read and written a block of one head's rows at a time."""
    return descriptor(TensorDescriptor, x, (1, 1, rows, width))


def copyable_by_tile(x: Tensor) -> Tensor:
    """``x``, or a copy whose layout the copy engine takes: dense rows, all on 16-byte borders."""
    *outer, last = x.stride()
    step = 16 // x.element_size()
    if last == 1 and x.data_ptr() % 16 == 0:
        legal = all(stride > 0 and stride % step == 0 for stride in outer)
        if legal:
            return x
        if all(s > 0 and s % step == 0 for s, n in zip(outer, x.shape[:-1], strict=True) if n > 1):
            # the stride of a dimension of size one is never walked
            strides = [
                s if n > 1 else x.shape[-1] for s, n in zip(outer, x.shape[:-1], strict=True)
            ]
            return x.as_strided(x.shape, (*strides, 1))
    return x.contiguous()


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Room for a result that lies in memory as ``x`` does, heads or tokens first."""
    batch, heads, length, head_dim = x.shape
    dtype = x.dtype if dtype is None else dtype
    if x.stride(1) < x.stride(2):
        return torch.empty(
            (batch, length, heads, head_dim), dtype=dtype, device=x.device
        ).transpose(1, 2)
    return torch.empty((batch, heads, length, head_dim), dtype=dtype, device=x.device)
