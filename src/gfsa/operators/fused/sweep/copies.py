"""The warps that move tiles between memory and the chip, beside the warpgroups that compute."""

# ruff: noqa: SIM102 - Gluon compiles a subset of Python

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gfsa.operators.fused.sweep.order import (
    HALF,
    ROWS,
    SPANS,
    count,
    done_with,
    draw_item,
    first_missing,
    first_tile,
    following,
    give,
    has_early_item,
    place_of,
    publish,
    take,
)

# items that are drawn and not finished
DRAWN = gl.constexpr(3)


@gluon.jit
def _load(tensor, b, h, row, barrier, room, slot, PARTS: gl.constexpr, D: gl.constexpr):
    """PARTS times HALF tokens from ``row`` on."""
    mbarrier.expect(barrier, PARTS * HALF * D * 2)
    for part in gl.static_range(PARTS):
        tma.async_copy_global_to_shared(
            tensor, [b, h, row + part * HALF, 0], barrier, room.index(PARTS * slot + part)
        )


@gluon.jit
def load_tokens(
    q_in, k_in, v_in, queries, keys, values, items, counter, mask,
    total, heads, group, n, blocks, span, mask_b,
    PARTS: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Draw items, and load their queries and the keys and values that they see."""
    qs, qfull, qempty = queries
    ks, kfull, kempty = keys
    vs, vfull, vempty = values
    slot = 0
    phase = 1
    qphase = 1
    islot = 0
    iphase = 1
    item = 0
    while item < count(total, blocks, MASK):
        item = draw_item(counter, mask, total, heads, n, blocks, span, mask_b, MASK)
        # a number that is too high ends the other warps' loops
        give(items, item, islot, iphase)
        islot, iphase = following(islot, iphase, DRAWN)
        if item < count(total, blocks, MASK):
            bh, block, early = place_of(item, total, blocks, span, MASK)
            b = bh // heads
            h = bh % heads
            mbarrier.wait(qempty.index(0), qphase)
            _load(q_in, b, h, block * ROWS, qfull.index(0), qs, 0, 1, D)
            begin = first_tile(mask, b, block * ROWS, n, block, early, mask_b, PARTS, MASK)
            for tile in range(begin, (2 * block + 2) // PARTS):
                row = tile * PARTS * HALF
                mbarrier.wait(kempty.index(slot), phase)
                _load(k_in, b, h // group, row, kfull.index(slot), ks, slot, PARTS, D)
                mbarrier.wait(vempty.index(slot), phase)
                _load(v_in, b, h // group, row, vfull.index(slot), vs, slot, PARTS, D)
                slot, phase = following(slot, phase, STAGES)
                if tile == begin:
                    # late: the first warpgroup begins while the second one ends its last item
                    mbarrier.wait(qempty.index(1), qphase)
                    _load(q_in, b, h, block * ROWS + HALF, qfull.index(1), qs, 1, 1, D)
            qphase = qphase ^ 1


@gluon.jit
def load_passes(
    u_io, passes, vempty, flags, items, mask, total, heads, n, blocks, span, mask_b,
    PARTS: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Load the U of earlier blocks as soon as it is there, into slots beside the values."""
    us, ufull = passes
    slot = 0
    phase = 1
    islot = 0
    iphase = 0
    item = take(items, islot, iphase)
    while item < count(total, blocks, MASK):
        bh, block, early = place_of(item, total, blocks, span, MASK)
        row = block * ROWS
        begin = first_tile(mask, bh // heads, row, n, block, early, mask_b, PARTS, MASK)
        missing = begin * PARTS
        for tile in range(begin, (2 * block + 2) // PARTS):
            mbarrier.wait(vempty.index(slot), phase)
            if tile < 2 * block // PARTS:
                while missing < (tile + 1) * PARTS:
                    missing = first_missing(flags + bh * 2 * blocks, missing)
                row = tile * PARTS * HALF
                _load(u_io, bh // heads, bh % heads, row, ufull.index(slot), us, slot, PARTS, D)
            else:
                # the warpgroups make it; the slot's phase goes on
                mbarrier.arrive(ufull.index(slot), count=1)
            slot, phase = following(slot, phase, STAGES)
        done_with(items, islot)
        islot, iphase = following(islot, iphase, DRAWN)
        item = take(items, islot, iphase)


@gluon.jit
def store_passes(
    u_io, made, flags, items, mask, total, heads, n, blocks, span, mask_b, MASK: gl.constexpr
):  # fmt: skip
    """Store each half block's U, then set its flag."""
    own, ready, free = made
    phase = 0
    islot = 0
    iphase = 0
    item = take(items, islot, iphase)
    while item < count(total, blocks, MASK):
        bh, block, early = place_of(item, total, blocks, span, MASK)
        if MASK == SPANS:
            waits = has_early_item(mask, bh // heads, block, n, blocks, mask_b) & (early == 0)
        for half in gl.static_range(2):
            mbarrier.wait(ready.index(half), phase)
            if MASK == SPANS:
                if waits:
                    # not before the early item, whose other rows are not what they have to be
                    at = 2 * block + half
                    while first_missing(flags + bh * 2 * blocks, at) == at:
                        pass
            row = block * ROWS + half * HALF
            tma.async_copy_shared_to_global(
                u_io, [bh // heads, bh % heads, row, 0], own.index(half)
            )
            publish(flags + bh * 2 * blocks + 2 * block + half)
            mbarrier.arrive(free.index(half), count=1)
        phase = phase ^ 1
        done_with(items, islot)
        islot, iphase = following(islot, iphase, DRAWN)
        item = take(items, islot, iphase)
