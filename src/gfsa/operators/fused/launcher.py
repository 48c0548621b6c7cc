"""Launching a kernel with little ado: what the host does once a call is small."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

Grid = tuple[int, int, int]
Block = tuple[int, int, int, int]
_Strides = tuple[int, ...]

# descriptors of one argument of one launch: a deep model has one a layer, and there may be
# thousands of launches, for as many lengths
_MOST_DESCRIBED = 64


class Kernel:
    """A Triton kernel.

    Args:
        function: the kernel; its arguments are tiles, pointers, numbers, then constants.
        describe: makes a descriptor of a tensor for the copy engine, given the shape of a tile.
    """

    def __init__(self, function: Any, describe: Callable[[Tensor, Block], Any] | None = None):
        self.function = function
        self.describe = describe or _describe
        self.compiled: dict[tuple[Any, ...], Any] = {}


class Launch:
    """A kernel for problems of one shape, launched directly once it is compiled.

    Triton's own launcher looks at every argument again in each call to find the compiled code
    that fits; for a kernel of a few microseconds that costs more than the kernel. Here everything
    is settled when the launch is made; a call says where the tensors lie.

    Args:
        variant: everything that the compiled code depends on beside the constants.
        blocks: the shape of a tile of each tensor that the copy engine moves.
        numbers: the kernel's arguments between its pointers and its constants.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: Grid,
        variant: tuple[Any, ...],
        blocks: Sequence[Block],
        numbers: tuple[Any, ...],
        constants: tuple[Any, ...],
        **options: Any,
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.key = (variant, constants)
        self.blocks = tuple(blocks)
        self.numbers = numbers
        self.constants = constants
        self.options = options
        # by the tensors' strides: a saved tensor may come back laid out in another way
        self.direct: dict[tuple[_Strides, ...], Callable[..., None]] = {}

    def __call__(self, tensors: Sequence[Tensor], *pointers: Tensor) -> None:
        """Launch on ``tensors``, one for each block, whose shapes are always the same."""
        strides = tuple([x.stride() for x in tensors])
        launch = self.direct.get(strides)
        if launch is not None:
            launch(tensors, pointers)
            return
        compiled = self.kernel.compiled.get(self.key)
        if compiled is not None:
            launch = self.direct[strides] = self._launcher(compiled, tensors)
            launch(tensors, pointers)
            return
        compiled = self.kernel.function[self.grid](
            *map(self.kernel.describe, tensors, self.blocks),
            *pointers,
            *self.numbers,
            *self.constants,
            **self.options,
        )
        # triton's interpreter compiles nothing
        if compiled is not None:
            self.kernel.compiled[self.key] = compiled

    def _launcher(self, compiled: Any, tensors: Sequence[Tensor]) -> Callable[..., None]:
        """How to launch compiled code again, on tensors that are laid out as these."""
        try:
            return _Direct(compiled, self, tensors)
        except (AttributeError, KeyError):
            # another version of Triton: take the way it documents
            return lambda tensors, pointers: compiled[self.grid](
                *map(self.kernel.describe, tensors, self.blocks),
                *pointers,
                *self.numbers,
                *self.constants,
            )


class _Direct:
    """Compiled code by Triton's C launcher, past the Python around it."""

    def __init__(self, compiled: Any, launch: Launch, tensors: Sequence[Tensor]) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        run = compiled.run
        if run.global_scratch_size or run.profile_scratch_size:
            raise AttributeError("this kernel needs scratch memory")
        # a kernel without tiles has no Python around its launcher
        around: Mapping[str, Any] = {"launcher": run.launch, "tensordesc_meta": ()}
        if tensors:
            around = inspect.getclosurevars(run.launch).nonlocals
        self.c_launcher = around["launcher"]
        self.encode = driver.active.utils.fill_tma_descriptor
        self.stream = driver.active.get_current_stream
        # the C launcher's arguments, with holes for what changes from call to call
        self.arguments: list[Any] = [
            *launch.grid,
            None,
            compiled.function,
            run.launch_cooperative_grid,
            run.launch_pdl,
            *(None, None),
            compiled.packed_metadata,
            *(None, None, None),
        ]
        # where a tensor's descriptor goes, what the copy engine is told of it, and descriptors by
        # address: a step of training finds its tensors where the step before had them
        self.tiles: list[tuple[int, tuple[Any, ...], dict[int, Any]]] = []
        for about, x in zip(around["tensordesc_meta"], tensors, strict=True):
            shape, strides = tuple(x.shape), x.stride()
            box = (
                about["swizzle"],
                about["elem_size"],
                TMA_DTYPE_DEVICE_TO_HOST[about["elem_type"]],
                about["block_size"],
            )
            self.tiles.append((len(self.arguments), (*box, shape, strides, 0), {}))
            self.arguments += [None, *shape, *strides]
        self.settled = (*launch.numbers, *launch.constants)

    def __call__(self, tensors: Sequence[Tensor], pointers: Sequence[Tensor]) -> None:
        arguments = self.arguments.copy()
        arguments[3] = self.stream(pointers[0].device.index)
        for (place, about, known), x in zip(self.tiles, tensors, strict=True):
            address = x.data_ptr()
            described = known.get(address)
            if described is None:
                if len(known) >= _MOST_DESCRIBED:
                    known.clear()
                described = known[address] = self.encode(address, *about)
            arguments[place] = described
        self.c_launcher(*arguments, *[x.data_ptr() for x in pointers], *self.settled)


def _describe(x: Tensor, block: Block) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Work on the GPU of ``x``; nothing to do where that is the current one."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device_of(x)


_HERE = nullcontext()


def launch_beside(x: Tensor, launch: Callable[..., None], *arguments: Any) -> None:
    """Launch on the GPU of ``x``, without a context where that is the current one."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        launch(*arguments)
        return
    with torch.cuda.device_of(x):
        launch(*arguments)


@functools.cache
def multiprocessors(device: int | None) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def copyable_by_tile(x: Tensor) -> Tensor:
    """``x``, or a copy whose layout the copy engine takes: dense rows, all on 16-byte borders."""
    strides = x.stride()
    wanted = _strides_by_tile(x.shape, strides, x.element_size())
    if wanted is None or x.data_ptr() % 16:
        return x.contiguous()
    return x if wanted == strides else x.as_strided(x.shape, wanted)


@functools.lru_cache(maxsize=1024)
def _strides_by_tile(shape: Sequence[int], strides: _Strides, size: int) -> _Strides | None:
    """The strides under which the copy engine takes a tensor without a copy, if there are any."""
    step = 16 // size
    # the stride of a dimension of size one is never walked
    walked = [s if n > 1 else shape[3] for s, n in zip(strides[:3], shape, strict=False)]
    for each in (strides[:3], walked):
        if strides[3] == 1 and all(s > 0 and s % step == 0 for s in each):
            return *each, 1
    return None


def empty_like(x: Tensor) -> Tensor:
    """Room for a result that lies in memory as ``x`` does, heads or tokens first."""
    return torch.empty_strided(x.shape, room_strides(x), dtype=x.dtype, device=x.device)


def room_strides(x: Tensor) -> Block:
    """The strides of :func:`empty_like`."""
    # sizes that the compiler does not know cannot be looked up
    strides_of = _dense_strides if type(x) is Tensor else _dense_strides.__wrapped__
    return strides_of(x.shape, x.stride(1) < x.stride(2))


@functools.lru_cache(maxsize=1024)
def _dense_strides(shape: Sequence[int], tokens_first: bool) -> Block:
    _, heads, length, head_dim = shape
    if tokens_first:
        return heads * length * head_dim, head_dim, heads * head_dim, 1
    return heads * length * head_dim, length * head_dim, head_dim, 1
