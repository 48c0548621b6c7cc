"""A control for racecheck: one warp hands numbers to four others through shared memory, correctly.

``sanitize.py`` runs it. As in the causal sweeps, a writer waits until a slot is empty, writes and
arrives; the readers wait until it is full, read, meet at a barrier, and one of them arrives. What
the tool reports here is no fault of the sweeps.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

SLOTS = gl.constexpr(3)
NUMBERS = 100


@gluon.jit
def _write(numbers, full, empty, out, count):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for number in range(count):
        slot = number % SLOTS
        mbarrier.wait(empty.index(slot), (number // SLOTS + 1) % 2)
        numbers.index(slot).store(gl.full([1], number, gl.int32, layout))
        gl.thread_barrier()
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _read(numbers, full, empty, out, count):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    total = 0
    for number in range(count):
        slot = number % SLOTS
        mbarrier.wait(full.index(slot), number // SLOTS % 2)
        total += gl.max(numbers.index(slot).load(layout), 0)
        gl.thread_barrier()
        mbarrier.arrive(empty.index(slot), count=1)
    gl.store(out, total)


@gluon.jit
def hand_over(out, count):
    """``out = 0 + 1 + … + (count − 1)``, each number through shared memory."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    NUMBER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], NUMBER)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    gl.thread_barrier()
    given = (numbers, full, empty, out, count)
    gl.warp_specialize([(_read, given), (_write, given)], [1], [24])


def handed_over() -> int:
    """The sum of the numbers below :data:`NUMBERS` as the readers saw them."""
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    hand_over[(1,)](out, NUMBERS, num_warps=4)
    return int(out)
