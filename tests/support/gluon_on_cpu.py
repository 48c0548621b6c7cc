"""Gluon kernels on a CPU: their source with numpy for tensors and a thread for each partition.

For kernels whose warps hand tiles to each other, where a wrong phase or count deadlocks. Threads
are delayed at random. A matrix product is computed as late as it may be, when its result is waited
for, and a copy into shared memory as early, so a slot that is released too early gives wrong
numbers. Layouts, rounding, registers and the order of memory accesses are not modelled.

Triton's interpreter does not run Gluon: it has no barriers, copy engine or partitions of warps.
Without this module only a Hopper GPU could run these kernels.
"""

from __future__ import annotations

import importlib
import itertools
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

# seconds after which a wait counts as a deadlock
PATIENCE = 20.0

_changed = threading.Condition()
_of_thread = threading.local()
_last_step = time.monotonic()


class DeadlockError(RuntimeError):
    """A thread waited for longer than the test is patient."""


def _get_on() -> None:
    """Some thread did what others may wait for."""
    global _last_step
    _last_step = time.monotonic()


def _look_again() -> None:
    """A thread polls memory, which no barrier tells about; end it if nothing moves any more."""
    if time.monotonic() - _last_step > PATIENCE:
        raise DeadlockError("a thread waits for what no program that runs will store")


class Number(int):
    """A scalar of a kernel, which has ``to`` as tensors do."""

    def to(self, _: Any) -> Number:
        return self


def _with_result(name: str) -> Callable[[Number, Any], Any]:
    def operation(self: Number, other: Any) -> Any:
        result = getattr(int, name)(self, other)
        return result if result is NotImplemented else Number(result)

    return operation


for _name in ("add", "sub", "mul", "floordiv", "mod", "xor", "radd", "rsub", "rmul"):
    setattr(Number, f"__{_name}__", _with_result(f"__{_name}__"))


class Tensor(np.ndarray):
    # layouts are not modelled
    type = types.SimpleNamespace(layout=None)

    def to(self, _: Any) -> Tensor:
        return self


def _tensor(x: Any) -> Any:
    return np.asarray(x).view(Tensor)


class Pointer:
    """An address in global memory, or one for each entry of a tensor."""

    def __init__(self, memory: np.ndarray, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def __sub__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at - offset)

    def to(self, _: Any) -> Pointer:
        return self


class Descriptor:
    """A tensor ``(B, H, N, D)`` for the copy engine, which moves ``rows`` of a head at a time."""

    layout = dtype = None

    def __init__(self, memory: np.ndarray, rows: int) -> None:
        self.memory, self.rows = memory, rows

    @property
    def block_shape(self) -> tuple[int, ...]:
        return 1, 1, self.rows, self.memory.shape[-1]

    def tile(self, where: Sequence[int]) -> np.ndarray:
        b, h, row, _ = where
        return self.memory[b, h, row : row + self.rows]

    @property
    def tile_bytes(self) -> int:
        """What a copy adds to its barrier: tokens have 16 bits."""
        return self.rows * self.memory.shape[-1] * 2


class Numbers(Descriptor):
    """Numbers in float32, ``(B, H, 1, N)``, of which ``rows`` are moved at a time."""

    @property
    def block_shape(self) -> tuple[int, ...]:
        return 1, 1, 1, self.rows

    def tile(self, where: Sequence[int]) -> np.ndarray:
        b, h, _, start = where
        assert start % 4 == 0, "the copy engine reads rows from multiples of 16 bytes on"
        return self.memory[b, h, 0, start : start + self.rows, None]

    @property
    def tile_bytes(self) -> int:
        return self.rows * 4


def moved_tiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each tile of tokens that is moved from now on, how many heads its tensor has."""
    taken: list[int] = []
    tile = Descriptor.tile

    def note(self: Descriptor, where: Sequence[int]) -> np.ndarray:
        taken.append(self.memory.shape[1])
        return tile(self, where)

    monkeypatch.setattr(Descriptor, "tile", note)
    return taken


class Shared:
    """Shared memory; undefined, NaN, until something is written."""

    dtype = None

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory

    @property
    def shape(self) -> tuple[int, ...]:
        return self.memory.shape

    def index(self, slot: int) -> Shared:
        return Shared(self.memory[slot])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.memory[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.memory.transpose(order))

    def load(self, layout: Any) -> Any:
        return _tensor(self.memory.copy())

    def store(self, x: Any) -> None:
        self.memory[...] = x

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        return Shared(self.memory.reshape(shape))


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes have."""

    def start(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.parity = 0

    def change(self, arrivals: int, expected: int) -> None:
        with _changed:
            _get_on()
            self.pending -= arrivals
            self.bytes += expected
            assert self.pending >= 0, "more arrivals than a phase has"
            if self.pending == 0 and self.bytes == 0:
                self.parity ^= 1
                self.pending = self.count
                _changed.notify_all()

    def wait(self, parity: int) -> None:
        _delay()
        end = time.monotonic() + PATIENCE
        with _changed:
            while self.parity == parity:
                if time.monotonic() > end:
                    raise DeadlockError(f"a thread waits for phase {parity} of a barrier")
                _changed.wait(0.1)


class _Barriers:
    def __init__(self, count: int) -> None:
        self.barriers = [Barrier() for _ in range(count)]

    def index(self, slot: int) -> Barrier:
        return self.barriers[slot]


class _Product:
    """A matrix product in flight."""

    def __init__(self, a: Any, b: Shared, total: Any, use_acc: bool) -> None:
        self.a, self.b, self.total, self.use_acc = a, b, total, use_acc
        self.value: Any = None

    def finish(self) -> None:
        a = self.a.memory if isinstance(self.a, Shared) else self.a
        self.value = _tensor(a @ self.b.memory)
        if self.use_acc:
            # a product that began before has ended before
            total = self.total.value if isinstance(self.total, _Product) else self.total
            self.value = self.value + total


def _delay() -> None:
    """Let others go ahead; some threads are slow throughout."""
    slowness = _of_thread.__dict__.setdefault("slowness", random.choice((2e-4, 2e-4, 2e-3)))
    if random.random() < 0.2:
        time.sleep(random.random() * slowness)


def _in_flight() -> list[_Product]:
    return _of_thread.__dict__.setdefault("products", [])


def _warpgroup_mma(
    a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False
) -> _Product:
    assert is_async
    product = _Product(a, b, acc, use_acc)
    _in_flight().append(product)
    return product


def _warpgroup_mma_wait(outstanding: int, deps: Sequence[Any]) -> Any:
    products = _in_flight()
    while len(products) > outstanding:
        products.pop(0).finish()
    values = tuple(x.value if isinstance(x, _Product) else x for x in deps)
    return values[0] if len(values) == 1 else values


def _copy_in(
    tensor: Descriptor, where: Sequence[int], barrier: Barrier, room: Shared, pred: bool = True
) -> None:
    if not pred:
        return
    _delay()
    tile = tensor.tile(where)
    assert not np.isnan(tile).any(), "loaded before it was stored"
    room.memory[...] = 0.0
    room.memory.reshape(tensor.rows, -1)[: len(tile)] = tile
    barrier.change(0, -tensor.tile_bytes)


def _copy_out(tensor: Descriptor, where: Sequence[int], room: Shared) -> None:
    _of_thread.__dict__.setdefault("stores", []).append((tensor, where, room))


def _finish_stores(_: int = 0) -> None:
    for tensor, where, room in _of_thread.__dict__.pop("stores", []):
        tile = tensor.tile(where)
        tile[...] = room.memory.reshape(tensor.rows, -1)[: len(tile)]


def _numbers_of_a_tile(places: Any, at: Pointer) -> Any:
    """Where each number of a tile lies: four of a thread, of two rows, follow their place."""
    i, d = np.indices(places.shape)
    return at.at + places + i // 8 % 2 * 2 + d % 2


def _assembly(text: str, constraints: str, arguments: Sequence[Any], **_: Any) -> Any:
    if "red." in text:
        x, places, at = arguments
        _delay()
        with _changed:
            at.memory[_numbers_of_a_tile(places, at)] += x
        return None
    if "ld.relaxed.gpu.global.v4" in text:
        places, at = arguments
        return _tensor(at.memory[_numbers_of_a_tile(places, at)])
    (x,) = arguments
    if "atom." in text:
        with _changed:
            drawn = x.memory[x.at]
            x.memory[x.at] += 1
        return Number(drawn)
    if text.startswith("ld."):
        _look_again()
        return _tensor(x.memory[x.at])
    if "wait_group" in text:
        _delay()
        _finish_stores()
    return x


def _where(condition: Any, x: Any, y: Any) -> Any:
    if np.ndim(condition) == 0:
        return Number(x if condition else y)
    return _tensor(np.where(condition, x, y))


def _reduced(function: Any) -> Callable[[Any, int], Any]:
    def reduce(x: Any, axis: int) -> Any:
        value = function(np.asarray(x), axis=axis)
        if np.ndim(x) > 1:
            return _tensor(value)
        return value if np.issubdtype(value.dtype, np.floating) else Number(value)

    return reduce


def _load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
    if np.ndim(pointer.at) == 0:
        value = pointer.memory[pointer.at]
        return Number(value) if isinstance(value, np.integer) else value
    at, mask = np.broadcast_arrays(pointer.at, mask)
    return _tensor(np.where(mask, pointer.memory[np.where(mask, at, 0)], other))


def _larger(x: Any, y: Any) -> Any:
    return Number(max(x, y)) if np.ndim(x) == 0 else _tensor(np.maximum(x, y))


def _expect(barrier: Barrier, count: int, pred: bool = True) -> None:
    if pred:
        barrier.change(1, count)


def _store(pointer: Pointer, x: Any, mask: Any = True) -> None:
    at, x, mask = np.broadcast_arrays(pointer.at, x, mask)
    pointer.memory[at[mask]] = x[mask]


def _exchange(pointer: Pointer, x: Any, sem: str) -> None:
    assert sem == "release"
    _delay()
    _get_on()
    pointer.memory[pointer.at] = x


def _allocate(dtype: str, shape: Sequence[int], layout: Any) -> Any:
    if dtype == "int64":
        return _Barriers(shape[0])
    return Shared(np.zeros(shape, int) if dtype == "int32" else np.full(shape, np.nan))


def _specialise(partitions: Sequence[Any], warps: Any, registers: Any) -> None:
    failures, grid, program = _of_thread.failures, _of_thread.grid, _of_thread.program

    def run(function: Callable[..., None], arguments: Sequence[Any]) -> None:
        _of_thread.grid, _of_thread.program = grid, program
        try:
            function(*arguments)
        except BaseException as problem:
            failures.append(problem)

    _run_all([threading.Thread(target=run, args=x, daemon=True) for x in partitions])


def _run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _decorator(function: Any = None, **_: Any) -> Any:
    return (lambda f: f) if function is None else function


def _stand_ins() -> dict[str, types.ModuleType]:
    language = types.ModuleType("language")
    layouts = (
        *("NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout", "BlockedLayout"),
        *("DotOperandLayout", "SliceLayout"),
    )
    for name in layouts:
        setattr(language, name, _nothing)
    functions: dict[str, Any] = {
        "constexpr": lambda x: x,
        "to_tensor": lambda x: x,
        "static_assert": _nothing,
        "num_warps": lambda: 4,
        "static_range": range,
        "minimum": lambda x, y: Number(min(x, y)),
        "maximum": _larger,
        "where": _where,
        "arange": lambda start, end, layout: _tensor(np.arange(start, end)),
        "full": lambda shape, value, dtype, layout: _tensor(np.full(shape, value)),
        "exp2": lambda x: _tensor(np.exp2(x)),
        "log2": lambda x: _tensor(np.log2(x)),
        "max": _reduced(np.max),
        "min": _reduced(np.min),
        "sum": _reduced(np.sum),
        "convert_layout": lambda x, layout: x,
        "thread_barrier": _nothing,
        "load": _load,
        "cdiv": lambda x, y: Number(-(-x // y)),
        "program_id": lambda axis: Number(_of_thread.program[axis]),
        "num_programs": lambda axis: Number(_of_thread.grid[axis]),
        "store": _store,
        "atomic_xchg": _exchange,
        "inline_asm_elementwise": _assembly,
        "allocate_shared_memory": _allocate,
        "warp_specialize": _specialise,
        **{name: name for name in ("float32", "uint32", "int8", "int32", "int64")},
    }
    for name, value in functions.items():
        setattr(language, name, value)
    hopper = types.ModuleType("hopper")
    hopper.fence_async_shared = _nothing  # type: ignore[attr-defined]
    hopper.warpgroup_mma = _warpgroup_mma  # type: ignore[attr-defined]
    hopper.warpgroup_mma_wait = _warpgroup_mma_wait  # type: ignore[attr-defined]
    hopper.mbarrier = types.SimpleNamespace(  # type: ignore[attr-defined]
        MBarrierLayout=_nothing,
        init=lambda barrier, count: barrier.start(count),
        expect=_expect,
        arrive=lambda barrier, count: barrier.change(count, 0),
        wait=lambda barrier, phase: barrier.wait(phase),
    )
    hopper.tma = types.SimpleNamespace(  # type: ignore[attr-defined]
        async_copy_global_to_shared=_copy_in,
        async_copy_shared_to_global=_copy_out,
        store_wait=_finish_stores,
    )
    gluon = types.ModuleType("gluon")
    gluon.jit = _decorator  # type: ignore[attr-defined]
    gluon.constexpr_function = _decorator  # type: ignore[attr-defined]
    gluon.language = language  # type: ignore[attr-defined]
    experimental = types.ModuleType("experimental")
    experimental.gluon = gluon  # type: ignore[attr-defined]
    root = "triton.experimental"
    return {
        root: experimental,
        f"{root}.gluon": gluon,
        f"{root}.gluon.language": language,
        f"{root}.gluon.language.nvidia": types.ModuleType("nvidia"),
        f"{root}.gluon.language.nvidia.hopper": hopper,
    }


@contextmanager
def on_cpu(*names: str) -> Iterator[list[types.ModuleType]]:
    """The modules of these names, which import each other and Gluon, for :func:`launch`."""
    stand_ins = _stand_ins()
    before = {name: sys.modules.get(name) for name in (*stand_ins, *names)}
    sys.modules.update(stand_ins)
    for name in names:
        sys.modules.pop(name, None)
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
        for name in names:
            _restore_attribute(name, before[name])


def _restore_attribute(name: str, module: types.ModuleType | None) -> None:
    """What ``from package import module`` takes: an import sets it beside ``sys.modules``."""
    package, _, own = name.rpartition(".")
    if module is None:
        vars(sys.modules[package]).pop(own, None)
    else:
        setattr(sys.modules[package], own, module)


def launch(
    kernel: Callable[..., None],
    programs: int | tuple[int, ...],
    *arguments: Any,
    at_once: int | None = None,
) -> None:
    """Run all programs, of a grid or of a line; raise the first error of any thread.

    Args:
        at_once: programs that the GPU holds, all by default; the next ones begin, in any order,
            when others end.
    """
    failures: list[BaseException] = []
    grid = (programs,) if isinstance(programs, int) else programs
    places = list(itertools.product(*map(range, grid)))
    room = threading.Semaphore(at_once or len(places))
    random.shuffle(places)
    _get_on()

    def run(program: tuple[int, ...]) -> None:
        _of_thread.failures, _of_thread.grid, _of_thread.program = failures, grid, program
        with room:
            try:
                kernel(*arguments)
            except BaseException as problem:
                failures.append(problem)

    _run_all([threading.Thread(target=run, args=(place,), daemon=True) for place in places])
    if failures:
        raise failures[0]
