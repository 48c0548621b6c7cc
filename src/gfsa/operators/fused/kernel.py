"""Launching a kernel with little ado: what the host does once a call is small."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

Grid = tuple[int, int, int]
Block = tuple[int, int, int, int]
_Launch = Callable[[Grid, Sequence[tuple[Tensor, Block]], tuple[Any, ...], tuple[Any, ...]], None]


class Kernel:
    """A Triton kernel, compiled once for each variant and then launched directly.

    Triton's own launcher looks at every argument again in each call to find the compiled code
    that fits; for a kernel of a few microseconds that costs more than the kernel. Here the caller
    names the variant: everything that the compiled code depends on beside the constants.

    Args:
        function: the kernel; its arguments are tiles, then the rest, then constants.
        describe: makes a descriptor of a tensor for the copy engine, given the shape of a tile.
    """

    def __init__(self, function: Any, describe: Callable[[Tensor, Block], Any] | None = None):
        self.function = function
        self.describe = describe or _describe
        self.launchers: dict[tuple[Any, ...], _Launch] = {}

    def __call__(
        self,
        grid: Grid,
        variant: tuple[Any, ...],
        tiles: Sequence[tuple[Tensor, Block]],
        rest: tuple[Any, ...],
        constants: tuple[Any, ...],
        **options: Any,
    ) -> None:
        key = (variant, constants)
        launch = self.launchers.get(key)
        if launch is not None:
            launch(grid, tiles, rest, constants)
            return
        described = (self.describe(x, block) for x, block in tiles)
        compiled = self.function[grid](*described, *rest, *constants, **options)
        # triton's interpreter compiles nothing
        if compiled is not None:
            self.launchers[key] = self._launcher(compiled)

    def _launcher(self, compiled: Any) -> _Launch:
        """How to launch compiled code again."""
        try:
            return _Direct(compiled).launch
        except (AttributeError, KeyError):
            # another version of Triton: take the way it documents
            return lambda grid, tiles, rest, constants: compiled[grid](
                *(self.describe(x, block) for x, block in tiles), *rest, *constants
            )


class _Direct:
    """Compiled code by Triton's C launcher, past the Python around it."""

    def __init__(self, compiled: Any) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        run = compiled.run
        around = inspect.getclosurevars(run.launch).nonlocals
        self.c_launcher = around["launcher"]
        self.encode = driver.active.utils.fill_tma_descriptor
        self.stream = driver.active.get_current_stream
        # what the copy engine is told of each tensor beside where it lies
        self.boxes = [
            (
                about["swizzle"],
                about["elem_size"],
                TMA_DTYPE_DEVICE_TO_HOST[about["elem_type"]],
                about["block_size"],
            )
            for about in around["tensordesc_meta"]
        ]
        self.fixed = (
            compiled.function,
            run.launch_cooperative_grid,
            run.launch_pdl,
            None,
            None,
            compiled.packed_metadata,
            None,
            None,
            None,
        )
        if run.global_scratch_size or run.profile_scratch_size:
            raise AttributeError("this kernel needs scratch memory")

    def launch(
        self,
        grid: Grid,
        tiles: Sequence[tuple[Tensor, Block]],
        rest: tuple[Any, ...],
        constants: tuple[Any, ...],
    ) -> None:
        values: list[Any] = []
        encode = self.encode
        for (x, _), box in zip(tiles, self.boxes, strict=True):
            shape, strides = x.shape, x.stride()
            values.append(encode(x.data_ptr(), *box, shape, strides, 0))
            values += shape
            values += strides
        stream = self.stream(tiles[0][0].device.index)
        self.c_launcher(*grid, stream, *self.fixed, *values, *rest, *constants)


def _describe(x: Tensor, block: Block) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


def variant(q: Tensor, k: Tensor) -> tuple[Any, ...]:
    """What compiled code depends on: Triton tells lengths by their divisibility, and ones apart."""
    length = q.shape[2]
    return q.device.index, q.dtype, length % 16 == 0, length == 1, q.shape[1] == k.shape[1]


def copyable_by_tile(x: Tensor) -> Tensor:
    """``x``, or a copy whose layout the copy engine takes: dense rows, all on 16-byte borders."""
    batch, head, token, feature = x.stride()
    step = 16 // x.element_size()
    if feature == 1 and x.data_ptr() % 16 == 0:
        if min(batch, head, token) > 0 and not (batch | head | token) % step:
            return x
        sizes = x.shape[:3]
        # the stride of a dimension of size one is never walked
        strides = [s if n > 1 else x.shape[3] for s, n in zip(x.stride()[:3], sizes, strict=True)]
        if all(s > 0 and s % step == 0 for s in strides):
            return x.as_strided(x.shape, (*strides, 1))
    return x.contiguous()


def empty_like(x: Tensor) -> Tensor:
    """Room for a result that lies in memory as ``x`` does, heads or tokens first."""
    _, heads, length, head_dim = x.shape
    strides = (heads * length * head_dim, length * head_dim, head_dim, 1)
    if x.stride(1) < x.stride(2):
        strides = (heads * length * head_dim, head_dim, heads * head_dim, 1)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
