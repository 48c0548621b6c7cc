"""The warps that move tiles between memory and the chip, beside the warpgroups that compute."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gfsa.kernels.sweep.order import (
    BLOCK,
    DRAWN,
    END,
    FIRST_TILE,
    HALF,
    HEAD,
    NUMBERS,
    ORIGIN,
    PLANNED,
    ROWS,
    SEQUENCE,
    SPANS,
    done_with,
    draw,
    first_missing,
    following,
    give,
    place,
    place_of,
    publish,
    slots_of,
    take,
    tell,
    told,
    told_place,
    wait_for_room,
)


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
    q_in, k_in, v_in, queries, keys, values, items, counter, plan,
    total, heads, group, blocks, span,
    PARTS: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Draw items, and load their queries and the keys and values that they see."""
    ring = (0, 1, 1)
    islot = 0
    iphase = 1
    item = 0
    slots = slots_of(blocks, MASK)
    while item < total * slots:
        item = draw(counter)
        if MASK == SPANS:
            bh, slot = place(gl.minimum(item, total * slots - 1), total, slots, span)
            blocks_of_slot = plan + (bh // heads * slots + slot) * 2 * NUMBERS
            # a number that is too high is given once
            for which in range(gl.where(item < total * slots, 0, 1), 2):
                planned = blocks_of_slot + which * NUMBERS - PLANNED
                if (gl.load(planned + END) > 0) | (item >= total * slots):
                    wait_for_room(items, islot, iphase)
                    for number in gl.static_range(PLANNED, PLANNED + NUMBERS):
                        tell(items, islot, number, gl.load(planned + number))
                    tell(items, islot, SEQUENCE, bh // heads)
                    tell(items, islot, HEAD, bh % heads)
                    give(items, item, islot, iphase)
                    islot, iphase = following(islot, iphase, DRAWN)
                    if item < total * slots:
                        ring = _load_item(
                            q_in, k_in, v_in, queries, keys, values, bh,
                            gl.load(planned + ORIGIN), gl.load(planned + BLOCK),
                            gl.load(planned + FIRST_TILE), heads, group, ring,
                            PARTS, STAGES, D,
                        )  # fmt: skip
        else:
            # a number that is too high ends the other warps' loops
            give(items, item, islot, iphase)
            islot, iphase = following(islot, iphase, DRAWN)
            if item < total * slots:
                bh, block = place(item, total, slots, span)
                ring = _load_item(
                    q_in, k_in, v_in, queries, keys, values, bh, 0, block, 0, heads, group,
                    ring, PARTS, STAGES, D,
                )  # fmt: skip


@gluon.jit
def _load_item(
    q_in, k_in, v_in, queries, keys, values, bh, origin, block, begin, heads, group, ring,
    PARTS: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Load what one item sees; ``ring`` are the next slot, its phase and that of the queries."""
    qs, qfull, qempty = queries
    ks, kfull, kempty = keys
    vs, vfull, vempty = values
    slot, phase, qphase = ring
    b = bh // heads
    h = bh % heads
    mbarrier.wait(qempty.index(0), qphase)
    _load(q_in, b, h, origin + block * ROWS, qfull.index(0), qs, 0, 1, D)
    for tile in range(begin, (2 * block + 2) // PARTS):
        row = origin + tile * PARTS * HALF
        mbarrier.wait(kempty.index(slot), phase)
        _load(k_in, b, h // group, row, kfull.index(slot), ks, slot, PARTS, D)
        mbarrier.wait(vempty.index(slot), phase)
        _load(v_in, b, h // group, row, vfull.index(slot), vs, slot, PARTS, D)
        slot, phase = following(slot, phase, STAGES)
        if tile == begin:
            # late: the first warpgroup begins while the second one ends its last item
            mbarrier.wait(qempty.index(1), qphase)
            _load(q_in, b, h, origin + block * ROWS + HALF, qfull.index(1), qs, 1, 1, D)
    return slot, phase, qphase ^ 1


@gluon.jit
def load_passes(
    u_io, passes, vempty, flags, items, total, heads, blocks, span,
    PARTS: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Load the U of earlier blocks as soon as it is there, into slots beside the values."""
    us, ufull = passes
    slot = 0
    phase = 1
    islot = 0
    iphase = 0
    slots = slots_of(blocks, MASK)
    item = take(items, islot, iphase)
    while item < total * slots:
        begin = 0
        if MASK == SPANS:
            bh, b, h, block, origin = told_place(items, islot, heads)
            begin = told(items, islot, FIRST_TILE)
        else:
            bh, b, h, block, origin = place_of(item, total, heads, blocks, span)
        missing = begin * PARTS
        for tile in range(begin, (2 * block + 2) // PARTS):
            mbarrier.wait(vempty.index(slot), phase)
            if tile < 2 * block // PARTS:
                while missing < (tile + 1) * PARTS:
                    missing = first_missing(flags + (bh * 2 * blocks + origin // HALF), missing)
                row = origin + tile * PARTS * HALF
                _load(u_io, b, h, row, ufull.index(slot), us, slot, PARTS, D)
            else:
                # the warpgroups make it; the slot's phase goes on
                mbarrier.arrive(ufull.index(slot), count=1)
            slot, phase = following(slot, phase, STAGES)
        done_with(items, islot)
        islot, iphase = following(islot, iphase, DRAWN)
        item = take(items, islot, iphase)


@gluon.jit
def store_passes(u_io, made, flags, items, total, heads, blocks, span, MASK: gl.constexpr):
    """Store each half block's U, then set its flag.

    With spans, a half block that is cut short is stored by its warpgroup; no other block needs it.
    """
    own, ready, free = made
    phase = 0
    islot = 0
    iphase = 0
    slots = slots_of(blocks, MASK)
    item = take(items, islot, iphase)
    while item < total * slots:
        if MASK == SPANS:
            bh, b, h, block, origin = told_place(items, islot, heads)
            end = told(items, islot, END)
        else:
            bh, b, h, block, origin = place_of(item, total, heads, blocks, span)
        for half in gl.static_range(2):
            mbarrier.wait(ready.index(half), phase)
            row = block * ROWS + half * HALF
            flag = flags + (bh * 2 * blocks + (origin + row) // HALF)
            if MASK == SPANS:
                if row + HALF <= end:
                    _store_half(u_io, own, flag, b, h, origin + row, half)
            else:
                _store_half(u_io, own, flag, b, h, row, half)
            mbarrier.arrive(free.index(half), count=1)
        phase = phase ^ 1
        done_with(items, islot)
        islot, iphase = following(islot, iphase, DRAWN)
        item = take(items, islot, iphase)


@gluon.jit
def _store_half(u_io, own, flag, b, h, row, half: gl.constexpr):
    tma.async_copy_shared_to_global(u_io, [b, h, row, 0], own.index(half))
    publish(flag)
