"""Launches of Triton kernels: what a call poses, how its tensors lie, and what is compiled.

The records of a call come first, then layouts, then tiles as kernels read them, then launches
without the per-call work of Triton's own launcher, and launches that are prepared: beside kernels
of some ten microseconds each Python call counts.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter, or_
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from gfsa.kernels import routes
from gfsa.operators.call import DecisionCache
from gfsa.operators.operator import PLAIN

# kinds of mask, as compile-time numbers
NO_MASK = 0
KEY_MASK = 1
FULL_MASK = 2
SPANS = 3


class Options(NamedTuple):
    """The numbers of a call, as one record beside its tensors."""

    scale: float
    is_causal: bool = False
    dropout_p: float = 0.0
    exclusive: bool = False
    """Whether there is an exclusive term."""
    sums: bool = True
    """Whether the gradients of coefficients and shares are wanted; degree 2 gives them anyway."""


class Inputs(NamedTuple):
    """What a route's forward takes.

    Args:
        q, k, v, coeffs, mask, seed, share: as in :func:`gfsa.kernels.op.filter_attention`.
        keeps: whether there will be a gradient.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    coeffs: Tensor
    mask: Tensor | None
    seed: Tensor | None
    options: Options
    keeps: bool = True
    share: Tensor | None = None


# the filter; A·V, undefined where nothing is kept; and each row's natural logsumexp (B, H, N)
Forward = tuple[Tensor, Tensor, Tensor]
# dq, dk, dv and dc
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


class Saved(NamedTuple):
    """What a forward pass saves for its gradient.

    Args:
        q, k, v: the tokens.
        u: ``A·V``; empty if the gradient does without it.
        out: the filter's output; with an exclusive term, whose gradient does not read it, ``A·V``.
        lse: each row's logsumexp, as the gradient takes it.
        coeffs: ``(H, 2 or 3)``, float32, contiguous.
        mask, seed, share: as in the forward pass.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    u: Tensor
    out: Tensor
    lse: Tensor
    coeffs: Tensor
    mask: Tensor | None = None
    seed: Tensor | None = None
    share: Tensor | None = None


class Tiles(NamedTuple):
    """How one kernel cuts its work."""

    rows: int
    """Rows that a program owns."""
    cols: int
    """Rows of the other side that it takes at a time."""
    warps: int
    stages: int = 1
    """Depth of the load pipeline, where Triton's compiler makes it."""


class Problem(NamedTuple):
    """What launches depend on: calls with equal problems differ in their tensors alone."""

    batch: int
    heads: int
    key_heads: int
    length: int
    head_dim: int
    dtype: torch.dtype
    device: int | None
    options: Options
    mask_strides: tuple[int, int, int, int]
    """Over ``(B, H, N, N)``."""
    mask_kind: int

    @property
    def group(self) -> int:
        """Query heads that share one head of keys."""
        return self.heads // self.key_heads

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The first numbers of most kernels: query heads, heads of a group, tokens."""
        return self.heads, self.group, self.length

    @property
    def variant(self) -> tuple[Any, ...]:
        """What compiled code depends on.

        Triton compiles separately for lengths that are multiples of 16, for ones, and for numbers
        that need 64 bits.
        """
        return (
            self.device,
            self.dtype,
            self.length % 16 == 0,
            self.length == 1,
            self.group == 1,
            self.group % 16 == 0,
            *(stride >= 2**31 for stride in self.mask_strides),
        )


def are_spans(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a mask is given by the spans of what queries see, int32 ``(B or 1, 2, N)``.

    Under causality query i sees the keys ``spans[:, 0, i] … i``, and key j is seen by the queries
    ``j … spans[:, 1, j]``. Neither of them decreases. Documents and windows are such masks: see
    :meth:`gfsa.operators.visibility.Visibility.spans`.
    """
    return mask is not None and mask.dtype == torch.int32


def problem_of(q: Tensor, k: Tensor, mask: Tensor | None, options: Options) -> Problem:
    """The problem that a call poses.

    Args:
        q: ``(B, H, N, D)``; k: ``(B, H / group, N, D)``.
        mask: bool, broadcastable to ``(B, H, N, N)``; or spans, see :func:`are_spans`.
    """
    batch, heads, length, head_dim = q.shape
    strides, kind = (0, 0, 0, 0), NO_MASK
    if are_spans(mask):
        # one row for all sequences, or a row for each
        strides, kind = (0 if mask.shape[0] == 1 else 2 * length, 0, 0, 0), SPANS
    elif mask is not None:
        strides, kind = _mask_layout(mask.shape, mask.stride(), length)
    sizes = batch, heads, k.shape[1], length, head_dim
    return Problem(*sizes, q.dtype, q.device.index, options, strides, kind)


@functools.lru_cache(maxsize=1024)
def _mask_layout(
    shape: torch.Size, strides: tuple[int, ...], length: int
) -> tuple[tuple[int, int, int, int], int]:
    """A mask's strides over ``(B, H, N, N)`` and its kind."""
    missing = 4 - len(shape)
    # a broadcast dimension has stride 0; one sequence of a batch may serve them all
    used = [s if n > 1 else 0 for s, n in zip(strides, shape, strict=True)]
    b, h, i, j = (*(0,) * missing, *used)
    return (b, h, i, j), KEY_MASK if i == 0 or length == 1 else FULL_MASK


def padded(size: int) -> int:
    """The next power of two, 16 at least: what a tile's side may be."""
    return max(16, 1 << (size - 1).bit_length())


Strides = tuple[int, ...]


def copyable_by_tile(x: Tensor) -> Tensor:
    """``x``, or a copy whose layout the copy engine takes: dense rows, aligned to 16 bytes."""
    strides = x.stride()
    wanted = _strides_by_tile(x.shape, strides, x.element_size())
    if wanted is None or x.data_ptr() % 16:
        # heads or tokens first as in x: results are laid out as the copy is, and the compiler
        # expects them to be laid out as x is
        return empty_like(x).copy_(x)
    return x if wanted == strides else x.as_strided(x.shape, wanted)


@functools.lru_cache(maxsize=1024)
def _strides_by_tile(shape: Sequence[int], strides: Strides, size: int) -> Strides | None:
    """The strides under which the copy engine takes a tensor without a copy, None if none do."""
    step = 16 // size
    # the stride of a dimension of size 1 has no effect
    effective = [s if n > 1 else shape[3] for s, n in zip(strides[:3], shape, strict=False)]
    for candidate in (strides[:3], effective):
        if strides[3] == 1 and all(s > 0 and s % step == 0 for s in candidate):
            return *candidate, 1
    return None


def empty_like(x: Tensor) -> Tensor:
    """An uninitialised result that is laid out as ``x`` is, heads or tokens first."""
    return torch.empty_strided(x.shape, result_strides(x), dtype=x.dtype, device=x.device)


def result_strides(x: Tensor) -> tuple[int, int, int, int]:
    """The strides of :func:`empty_like`."""
    # sizes that the compiler does not know cannot be cache keys
    strides_of = _dense_strides if type(x) is Tensor else _dense_strides.__wrapped__
    return strides_of(x.shape, x.stride(1) < x.stride(2))


@functools.lru_cache(maxsize=1024)
def _dense_strides(shape: Sequence[int], tokens_first: bool) -> tuple[int, int, int, int]:
    _, heads, length, head_dim = shape
    if tokens_first:
        return heads * length * head_dim, head_dim, heads * head_dim, 1
    return heads * length * head_dim, length * head_dim, head_dim, 1


def sum_groups(x: Tensor, like: Tensor) -> Tensor:
    """Add up the heads of ``x`` that share one head of ``like``."""
    group = x.shape[1] // like.shape[1]
    if group == 1:
        return x
    total = empty_like(like)
    return torch.sum(x.unflatten(1, (-1, group)), 2, out=total)


LOG2E = tl.constexpr(1.4426950408889634)

# for kernels that are launched directly: compiled code must not depend on numbers that are not in
# the launch's variant, nor on the alignment of tensors that come from the caller or are slices
JIT_OPTIONS = {
    "do_not_specialize": ["heads", "parts", "mask_b", "mask_h", "mask_i", "mask_j"],
    "do_not_specialize_on_alignment": [
        *("coeffs", "shares", "dc_out", "mask", "seed_in", "theta", "base", "basis"),
    ],
}

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
        by: makes what the kernel takes of a tensor, given the shape of a tile.
    """

    def __init__(self, function: Any, by: Callable[[Tensor, Block], Any] | None = None):
        self.function = function
        self.describe = by or describe
        self.compiled: dict[tuple[Any, ...], Any] = {}


class Launch:
    """A kernel for tensors of one layout, launched directly once it is compiled.

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
        # launches the compiled code, once there is some
        self.direct: Callable[..., None] | None = None

    def __call__(
        self,
        tensors: Sequence[Tensor],
        *pointers: Tensor,
        numbers: tuple[Any, ...] | None = None,
    ) -> None:
        """Launch on ``tensors``, one for each block, whose layouts are always the same.

        Args:
            numbers: in place of the launch's own, for this call alone; they are not kept, since
                other threads use the same launch.
        """
        launch = self.direct
        if launch is not None:
            launch(tensors, pointers, numbers)
            return
        compiled = self.kernel.compiled.get(self.key)
        if compiled is not None:
            launch = self.direct = self._launcher(compiled, tensors)
            launch(tensors, pointers, numbers)
            return
        described = [*map(self.kernel.describe, tensors, self.blocks)]
        given = *pointers, *(self.numbers if numbers is None else numbers), *self.constants
        compiled = self.kernel.function[self.grid](*described, *given, **self.options)
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
            addresses = map(Tensor.data_ptr, tensors)
            for (index, encoding, known), address in zip(self.tiles, addresses, strict=True):
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


# the tensors that a call gives, by name
Given = Mapping[str, Any]
# makes a tensor of a call
Room = Callable[[], Tensor]
Results = TypeVar("Results")


def room(
    shape: Sequence[int], like: Tensor, strides: Strides | None = None, dtype: Any = None
) -> Room:
    """What makes an uninitialised tensor where ``like`` is; contiguous, of its dtype by default."""
    dtype = like.dtype if dtype is None else dtype
    if strides is None:
        return functools.partial(torch.empty, shape, dtype=dtype, device=like.device)
    return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=like.device)


def room_like(x: Tensor) -> Room:
    """What makes a tensor as :func:`empty_like` does."""
    return room(x.shape, x, result_strides(x))


def rooms_by_query_head(given: Given) -> dict[str, Room]:
    """Those of dK and dV: a row for each query head, see :func:`sum_groups`."""
    q, k, v = given["q"], given["k"], given["v"]
    is_grouped = q.shape[1] != k.shape[1]
    return {"dk": room_like(q if is_grouped else k), "dv": room_like(q if is_grouped else v)}


class Prepared:
    """The launches of a call, for tensors of one layout.

    Tensors have names; where a call gives none, its first tensor stands in, which is never read.

    Args:
        given: the tensors that a call gives, or None, by name.
        rooms: what makes each further tensor, by name.
        steps: the launches, with the names of their tiles and of their pointers.
        results: the names of what a call returns.
        is_kept: whether later calls may use it.
    """

    def __init__(
        self,
        given: Given,
        rooms: Mapping[str, Room],
        steps: Sequence[tuple[Launch, str, str]],
        results: str,
        is_kept: bool = True,
    ) -> None:
        places = {name: place for place, name in enumerate([*given, *rooms])}
        places |= {name: 0 for name, x in given.items() if x is None}

        def picked(names: str) -> Callable[[Sequence[Any]], Any]:
            found = [places[name] for name in names.split()]
            if len(found) > 1:
                return itemgetter(*found)
            # itemgetter takes one at least, and gives no tuple of a single one
            return itemgetter(slice(found[0], found[0] + 1) if found else slice(0))

        self.rooms = tuple(rooms.values())
        self.steps = [(launch, picked(tiles), picked(others)) for launch, tiles, others in steps]
        self.results = itemgetter(*[places[name] for name in results.split()])
        self.is_kept = is_kept

    def __call__(self, given: Sequence[Tensor | None]) -> Any:
        tensors: list[Any] = [*given]
        for make in self.rooms:
            tensors.append(make())
        for launch, tiles, pointers in self.steps:
            # without the call of the launch, once its code is compiled
            run = launch.direct
            if run is not None:
                run(tiles(tensors), pointers(tensors))
            else:
                launch(tiles(tensors), *pointers(tensors))
        return self.results(tensors)


class Launches(Generic[Results]):
    """Launches that are prepared once for all calls of one signature.

    Args:
        prepare: makes them, given the tensors of a call and what else they depend on.
        tiles: the names of the tensors that the copy engine moves; the shapes of the first two
            decide about those of the others.
        pointers: the names of the others. The first one's shape may vary, the last one may be None.
    """

    def __init__(self, prepare: Callable[..., Prepared], tiles: str, pointers: str) -> None:
        self.prepare = prepare
        self.names = (*tiles.split(), *pointers.split(), "mask")
        self.known: DecisionCache[Prepared] = DecisionCache()
        # each keeps up to 64 descriptors for each tensor, hundreds of kilobytes together
        self.known.CAPACITY = 1024

    def __call__(
        self,
        tiles: tuple[Tensor, ...],
        pointers: tuple[Tensor | None, ...],
        mask: Tensor | None,
        *others: Any,
    ) -> Results:
        """Launch on such tensors and return the results.

        Args:
            others: what the launches depend on besides; hashable.
        """
        addresses = functools.reduce(or_, map(Tensor.data_ptr, tiles))
        first, numbers = tiles[0], pointers[0]
        assert numbers is not None
        signature = (
            first.shape,
            tiles[1].shape,
            first.dtype,
            first.device,
            numbers.shape,
            pointers[-1] is None,
            None if mask is None else (mask.shape, mask.stride(), mask.dtype),
            *others,
            *map(Tensor.stride, tiles),
        )
        prepared = None if addresses % 16 else self.known.get(signature)
        if prepared is None:
            copied = tuple(map(copyable_by_tile, tiles))
            if any(x is not y for x, y in zip(copied, tiles, strict=True)):
                return self(copied, pointers, mask, *others)
            tensors = dict(zip(self.names, (*tiles, *pointers, mask), strict=True))
            prepared = self.prepare(tensors, *others)
            if prepared.is_kept:
                self.known.remember(signature, prepared)
        if mask is not None:
            mask = mask.contiguous() if are_spans(mask) else mask.view(torch.uint8)
        results: Results = on_device_of(first, prepared, (*tiles, *pointers, mask))
        return results


def tiles_of(kernel: Kernel, tiles: Tiles, width: int) -> list[Block]:
    """The tiles of a kernel's tensors, whose names end in the side that they are on."""
    sides = {"_rows": tiles.rows, "_cols": tiles.cols}
    return [
        # a number for each token, or its features
        (1, 1, 1, tiles.cols) if name in ("lse_cols", "delta_cols") else (1, 1, side, width)
        for name in kernel.function.arg_names
        if (side := sides.get(name[-5:]))
    ]


def on_device_of(x: Tensor, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call ``work`` on the GPU of ``x``, without a context if that is the current device."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return work(*arguments, **options)
    with torch.cuda.device_of(x):
        return work(*arguments, **options)


@functools.cache
def multiprocessors(device: int | None) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


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


@functools.cache
def gluon_kernel(module: str, name: str) -> Kernel:
    """A Gluon kernel; its module is imported when one of its kernels is first used."""
    kernels = importlib.import_module(f"gfsa.kernels.{module}")
    return Kernel(getattr(kernels, name), describe_tiles())


@functools.cache
def describe_tiles() -> Callable[[Tensor, Block], Any]:
    """What makes descriptors of tokens, and of numbers in float32, as Gluon kernels take them."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    tokens = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    numbers = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=4)

    def describe(x: Tensor, block: Block) -> Any:
        layout = numbers if x.dtype == torch.float32 else tokens
        return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)

    return describe


def needs_registered_operator(q: Tensor) -> bool:
    """Whether a compiler, a tensor subclass or a dispatch mode has to see the operator."""
    return torch.compiler.is_compiling() or type(q) not in PLAIN or is_in_torch_dispatch_mode()
