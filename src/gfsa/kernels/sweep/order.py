"""Which program works on which rows, and how it learns that the U of earlier rows is there.

An item is a block of ROWS queries of one head. Its program needs the U of the earlier blocks of the
head that its queries see, which other programs make. Programs draw items in the order of their
numbers, so all lower items are finished or belong to programs that run, and waiting for lower items
alone never deadlocks, however few programs the GPU holds at a time.

With spans, an item is a slot of a row's plan, which has up to two blocks: see ``plan.py``. The warp
that draws items also reads the plan, and tells the others.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gfsa.kernels import problem
from gfsa.kernels.sweep import plan

SPANS = gl.constexpr(problem.SPANS)
# queries an item, and queries a warpgroup: the flags count by warpgroups
ROWS = gl.constexpr(128)
HALF = gl.constexpr(64)
# flags that are looked at together; after the last head's flags are as many numbers, the first of
# which counts the items that were drawn
LOOKED_AT = gl.constexpr(32)

# items that are drawn and not finished
DRAWN = gl.constexpr(3)
# what is told of a block with spans, after its item's number: what is planned for it, its sequence
# and its head
PLANNED = gl.constexpr(1)
ORIGIN = gl.constexpr(1 + plan.ORIGIN.value)
BLOCK = gl.constexpr(1 + plan.BLOCK.value)
END = gl.constexpr(1 + plan.END.value)
FIRST_TILE = gl.constexpr(1 + plan.FIRST_TILE.value)
MASKED_UNTIL = gl.constexpr(1 + plan.MASKED_UNTIL.value)
LATEST = gl.constexpr(1 + plan.LATEST.value)
NUMBERS = gl.constexpr(plan.NUMBERS.value)
SEQUENCE = gl.constexpr(1 + plan.NUMBERS.value)
HEAD = gl.constexpr(2 + plan.NUMBERS.value)
TOLD = gl.constexpr(3 + plan.NUMBERS.value)


@gluon.jit
def place(item, total, blocks, span):
    """``(head of all sequences, block)``: ``span`` heads at a time, their low rows first.

    Few heads at a time keep keys, values and U in the GPU's cache; many keep programs from waiting
    for each other.
    """
    group = item // (span * blocks)
    rest = item - group * span * blocks
    size = gl.minimum(span, total - group * span)
    block = rest // size
    return group * span + rest - block * size, block


@gluon.jit
def slots_of(blocks, MASK: gl.constexpr):
    """How many items a head has: its blocks or, with spans, the slots of its plan."""
    return blocks + (1 if MASK == SPANS else 0)


@gluon.jit
def following(slot, phase, SLOTS: gl.constexpr):
    """The next slot of a ring, and the phase of its barriers."""
    slot = slot + 1
    wraps = slot == SLOTS
    return gl.where(wraps, 0, slot), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def draw(counter):
    """The next item's number; for one warp."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mov.b32 $0, 0;
        @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
        shfl.sync.idx.b32 $0, $0, 0, 31, -1;
        }""", "=&r,l", [counter], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_for_room(items, slot, phase):
    _, _, empty = items
    mbarrier.wait(empty.index(slot), phase)


@gluon.jit
def give(items, item, slot, phase):
    """Tell the other warps of the program the item that was drawn."""
    numbers, full, _ = items
    wait_for_room(items, slot, phase)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers.index(slot).store(gl.full([1], item, gl.int32, layout))
    # one thread arrives, for all that have written
    gl.thread_barrier()
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def tell(items, slot, WHICH: gl.constexpr, number):
    """A number beside the item that is given next, where there is room: :func:`wait_for_room`."""
    numbers, _, _ = items
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers.index(WHICH * DRAWN + slot).store(gl.full([1], number, gl.int32, layout))


@gluon.jit
def told(items, slot, WHICH: gl.constexpr):
    """The number that :func:`tell` left beside the item that was taken."""
    numbers, _, _ = items
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(numbers.index(WHICH * DRAWN + slot).load(layout), 0)


@gluon.jit
def told_place(items, slot, heads):
    """``(head of all sequences, sequence, head, block, origin)`` of a block with spans."""
    b = told(items, slot, SEQUENCE)
    h = told(items, slot, HEAD)
    return b * heads + h, b, h, told(items, slot, BLOCK), told(items, slot, ORIGIN)


@gluon.jit
def place_of(item, total, heads, blocks, span):
    """As :func:`told_place` without spans."""
    bh, block = place(item, total, blocks, span)
    return bh, bh // heads, bh % heads, block, 0


@gluon.jit
def take(items, slot, phase):
    """The item that was given; :func:`done_with` when it is finished."""
    numbers, full, _ = items
    mbarrier.wait(full.index(slot), phase)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(numbers.index(slot).load(layout), 0)


@gluon.jit
def done_with(items, slot):
    """Leave the item's slot to the next one, after all that :func:`take` and :func:`told` read."""
    _, _, empty = items
    # One thread arrives on behalf of all warps of the partition, so all of them must have read the
    # slot first. compute-sanitizer's racecheck reports a race between these reads and the next
    # item's writes all the same, as it does for any kernel whose warps hand over by such barriers.
    gl.thread_barrier()
    mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def first_missing(flags, known):
    """The first half block from ``known`` on whose U is not there; earlier ones can be loaded.

    At most LOOKED_AT are looked at. For one warp.
    """
    at = known + gl.arange(0, LOOKED_AT, layout=gl.BlockedLayout([1], [32], [1], [0]))
    flag = gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l", [flags + at],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    first = gl.min(gl.where(flag == 0, at, known + LOOKED_AT), 0)
    # the copy engine, which loads U, sees memory through a proxy of its own
    return gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; fence.proxy.async; mov.b32 $0, $1;", "=r,r", [first],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def publish(flag):
    """Set a flag after all that the copy engine was told to store is stored; for one warp."""
    one = gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;", "=r,r",
        [gl.to_tensor(1)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    gl.thread_barrier()
    gl.atomic_xchg(flag, one, sem="release")
