"""Launches of Triton kernels without the per-call work of Triton's own launcher."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from gfsa.kernels.layout import Strides

TRITON = triton.__version__.partition("+")[0]
# the versions whose launcher in C is called by the position of its arguments
DIRECT_TRITON = ("3.6.0",)

Grid = tuple[int, int, int]
Block = tuple[int, int, int, int]

# how many descriptors of one argument of one launch are kept: a deep model needs one a layer, and
# there may be thousands of launches, for as many lengths
_MOST_DESCRIPTORS = 64


class Kernel:
    """A Triton kernel and what has been compiled of it.

    Args:
        function: the kernel; its arguments are tiles, pointers, numbers, then constants.
        describe: makes what the kernel takes of a tensor, given the shape of a tile: by default
            the copy engine's descriptor.
    """

    def __init__(self, function: Any, describe: Callable[[Tensor, Block], Any] | None = None):
        self.function = function
        self.describe = describe or _describe
        self.compiled: dict[tuple[Any, ...], Any] = {}


class Launch:
    """A kernel for problems of one shape, launched directly once it is compiled.

    Triton's own launcher inspects every argument again in each call to find the compiled code
    that fits; for a kernel of a few microseconds that costs more than the kernel. Here everything
    but the tensors' addresses is fixed when the launch is constructed.

    Args:
        variant: everything that the compiled code depends on besides constants and options.
        blocks: the shape of a tile of each tensor that the copy engine moves.
        numbers: the kernel's arguments between its pointers and its constants.
        options: those of the compiler, ``num_warps`` for one.
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
        self.key = (variant, constants, *sorted(options.items()))
        self.blocks = tuple(blocks)
        self.numbers = numbers
        self.constants = constants
        self.options = options
        # by the tensors' strides: a saved tensor may come back in another layout
        self.direct: dict[tuple[Strides, ...], Callable[..., None]] = {}

    def __call__(
        self,
        tensors: Sequence[Tensor],
        *pointers: Tensor,
        numbers: tuple[Any, ...] | None = None,
    ) -> None:
        """Launch on ``tensors``, one for each block, whose shapes are always the same.

        Args:
            numbers: in place of the launch's own, for this call alone; they are not kept, since
                other threads use the same launch.
        """
        strides = tuple([x.stride() for x in tensors])
        launch = self.direct.get(strides)
        if launch is not None:
            launch(tensors, pointers, numbers)
            return
        compiled = self.kernel.compiled.get(self.key)
        if compiled is not None:
            launch = self.direct[strides] = self._launcher(compiled, tensors)
            launch(tensors, pointers, numbers)
            return
        described = [*map(self.kernel.describe, tensors, self.blocks)]
        given = self.numbers if numbers is None else numbers
        compiled = self.kernel.function[self.grid](
            *described, *pointers, *given, *self.constants, **self.options
        )
        # triton's interpreter compiles nothing; addresses with strides, instead of descriptors,
        # are compiled for the strides that they have
        if compiled is not None and not any(isinstance(x, tuple) for x in described):
            self.kernel.compiled[self.key] = compiled

    def _launcher(self, compiled: Any, tensors: Sequence[Tensor]) -> Callable[..., None]:
        """Launches compiled code again, on tensors of this layout."""
        documented = functools.partial(self._documented, compiled)
        if TRITON not in DIRECT_TRITON:
            return documented
        try:
            return Direct(compiled, self, tensors, documented)
        except (AttributeError, KeyError, TypeError):
            # a GPU without a copy engine, or a kernel that needs scratch memory
            return documented

    def _documented(
        self,
        compiled: Any,
        tensors: Sequence[Tensor],
        pointers: Sequence[Tensor],
        numbers: tuple[Any, ...] | None = None,
    ) -> None:
        """Launch compiled code as Triton documents it."""
        compiled[self.grid](
            *map(self.kernel.describe, tensors, self.blocks),
            *pointers,
            *(self.numbers if numbers is None else numbers),
            *self.constants,
        )


class Direct:
    """Calls Triton's C launcher for compiled code, bypassing its Python wrapper.

    Its arguments are no documented interface, so only the versions of DIRECT_TRITON are called this
    way. A launcher that takes others raises TypeError before it launches anything; the call then
    goes to ``documented``.
    """

    def __init__(
        self,
        compiled: Any,
        launch: Launch,
        tensors: Sequence[Tensor],
        documented: Callable[..., None],
    ) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        run = compiled.run
        if run.global_scratch_size or run.profile_scratch_size:
            raise AttributeError("this kernel needs scratch memory")
        # a kernel without tiles has no Python wrapper around its launcher
        wrapped: Mapping[str, Any] = {"launcher": run.launch, "tensordesc_meta": ()}
        if tensors:
            wrapped = inspect.getclosurevars(run.launch).nonlocals
        self.c_launcher = wrapped["launcher"]
        self.encode = driver.active.utils.fill_tma_descriptor
        self.stream = driver.active.get_current_stream
        # the C launcher's arguments, None for those that change from call to call
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
        # for each tensor: the index of its descriptor, the arguments that encode one, and the
        # descriptors by address (a training step finds its tensors where the last step had them)
        self.tiles: list[tuple[int, tuple[Any, ...], dict[int, Any]]] = []
        for meta, x in zip(wrapped["tensordesc_meta"], tensors, strict=True):
            shape, strides = tuple(x.shape), x.stride()
            box = (
                meta["swizzle"],
                meta["elem_size"],
                TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]],
                meta["block_size"],
            )
            self.tiles.append((len(self.arguments), (*box, shape, strides, 0), {}))
            self.arguments += [None, *shape, *strides]
        self.documented = documented
        self.constants = launch.constants
        self.fixed = (*launch.numbers, *launch.constants)

    def __call__(
        self,
        tensors: Sequence[Tensor],
        pointers: Sequence[Tensor],
        numbers: tuple[Any, ...] | None = None,
    ) -> None:
        try:
            arguments = self.arguments.copy()
            arguments[3] = self.stream(pointers[0].device.index)
            for (index, encoding, known), x in zip(self.tiles, tensors, strict=True):
                address = x.data_ptr()
                descriptor = known.get(address)
                if descriptor is None:
                    if len(known) >= _MOST_DESCRIPTORS:
                        known.clear()
                    descriptor = known[address] = self.encode(address, *encoding)
                arguments[index] = descriptor
            fixed = self.fixed if numbers is None else (*numbers, *self.constants)
            self.c_launcher(*arguments, *[x.data_ptr() for x in pointers], *fixed)
        except TypeError:
            self.documented(tensors, pointers, numbers)

    def at(self, stream: int, addresses: tuple[int, ...], numbers: tuple[Any, ...]) -> None:
        """Launch a kernel without tiles on the addresses of its pointers, or raise TypeError."""
        arguments = self.arguments.copy()
        arguments[3] = stream
        self.c_launcher(*arguments, *addresses, *numbers, *self.constants)


def _describe(x: Tensor, block: Block) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which the GPU of ``x`` is the current device."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _NO_CHANGE
    return torch.cuda.device_of(x)


_NO_CHANGE = nullcontext()


def launch_on_device_of(x: Tensor, launch: Callable[..., None], *arguments: Any) -> None:
    """Launch on the GPU of ``x``, without a context if that is the current device."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        launch(*arguments)
        return
    with torch.cuda.device_of(x):
        launch(*arguments)


@functools.cache
def multiprocessors(device: int | None) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
