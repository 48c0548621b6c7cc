"""Launching a kernel with little ado: what the host does once a call is small."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
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
        self.launchers: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(
        self,
        grid: Grid,
        variant: tuple[Any, ...],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        **options: Any,
    ) -> None:
        key = (variant, constants)
        launch = self.launchers.get(key)
        if launch is not None:
            launch(grid, arguments, constants)
            return
        compiled = self.function[grid](*arguments, *constants, **options)
        # triton's interpreter compiles nothing
        if compiled is not None:
            self.launchers[key] = _launcher(compiled)


def _launcher(compiled: Any) -> Callable[[Grid, tuple[Any, ...], tuple[Any, ...]], None]:
    """How to launch compiled code again."""
    try:
        return _Direct(compiled).launch
    except (AttributeError, KeyError):
        # another version of Triton: take the way it documents
        return lambda grid, arguments, constants: compiled[grid](*arguments, *constants)


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

    def launch(self, grid: Grid, arguments: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        values: list[Any] = []
        boxes = iter(self.boxes)
        device = arguments[0].base.device.index
        for argument in arguments:
            if isinstance(argument, Tensor):
                values.append(argument.data_ptr())
            elif isinstance(argument, int | float):
                values.append(argument)
            else:
                shape, strides = argument.shape, argument.strides
                address = argument.base.data_ptr()
                values.append(self.encode(address, *next(boxes), shape, strides, 0))
                values += shape
                values += strides
        self.c_launcher(*grid, self.stream(device), *self.fixed, *values, *constants)


def variant(q: Tensor, k: Tensor) -> tuple[Any, ...]:
    """What compiled code depends on: Triton tells lengths by their divisibility, and ones apart."""
    length = q.shape[2]
    return q.device.index, q.dtype, length % 16 == 0, length == 1, q.shape[1] == k.shape[1]


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


def empty_like(x: Tensor) -> Tensor:
    """Room for a result that lies in memory as ``x`` does, heads or tokens first."""
    _, heads, length, head_dim = x.shape
    strides = (heads * length * head_dim, length * head_dim, head_dim, 1)
    if x.stride(1) < x.stride(2):
        strides = (heads * length * head_dim, head_dim, heads * head_dim, 1)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
