"""The warps that move tiles between memory and the chip, beside the warpgroups that compute."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gfsa.operators.fused.sweep.order import (
    DRAWN,
    EARLY,
    FIRST_TILE,
    HALF,
    MASKED_UNTIL,
    ROWS,
    SPANS,
    done_with,
    draw,
    first_missing,
    following,
    give,
    has_early_round,
    key_range,
    place,
    publish,
    take,
    tell,
    told,
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
    q_in, k_in, v_in, queries, keys, values, items, counter, mask,
    total, heads, group, n, blocks, span, mask_b,
    PARTS: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Draw items, and load their queries and the keys and values that they see."""
    ring = (0, 1, 1)
    islot = 0
    iphase = 1
    item = 0
    while item < total * blocks:
        item = draw(counter)
        if MASK == SPANS:
            bh, block = place(gl.minimum(item, total * blocks - 1), total, blocks, span)
            spans = mask + (bh // heads).to(gl.int64) * mask_b
            first, first_until = key_range(spans, block, n, 0, PARTS)
            second, second_until = key_range(spans, block, n, 1, PARTS)
            own = 2 * block // PARTS
            early = has_early_round(spans, block, n, blocks) & (item < total * blocks)
            for whole in range(gl.where(early, 0, 1), 2):
                begin = gl.where(whole == 1, first, own)
                wait_for_room(items, islot, iphase)
                tell(items, islot, EARLY, 1 - whole)
                tell(items, islot, FIRST_TILE, begin)
                tell(items, islot, FIRST_TILE + 1, gl.maximum(second, begin))
                tell(items, islot, MASKED_UNTIL, first_until)
                tell(items, islot, MASKED_UNTIL + 1, second_until)
                give(items, item, islot, iphase)
                islot, iphase = following(islot, iphase, DRAWN)
                if item < total * blocks:
                    ring = _load_item(
                        q_in, k_in, v_in, queries, keys, values, bh, block, begin, heads, group,
                        ring, PARTS, STAGES, D,
                    )  # fmt: skip
        else:
            # a number that is too high ends the other warps' loops
            give(items, item, islot, iphase)
            islot, iphase = following(islot, iphase, DRAWN)
            if item < total * blocks:
                bh, block = place(item, total, blocks, span)
                ring = _load_item(
                    q_in, k_in, v_in, queries, keys, values, bh, block, 0, heads, group,
                    ring, PARTS, STAGES, D,
                )  # fmt: skip


@gluon.jit
def _load_item(
    q_in, k_in, v_in, queries, keys, values, bh, block, begin, heads, group, ring,
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
    _load(q_in, b, h, block * ROWS, qfull.index(0), qs, 0, 1, D)
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
    item = take(items, islot, iphase)
    while item < total * blocks:
        bh, block = place(item, total, blocks, span)
        begin = 0
        if MASK == SPANS:
            begin = told(items, islot, FIRST_TILE)
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
def store_passes(u_io, made, flags, items, total, heads, blocks, span):
    """Store each half block's U, then set its flag."""
    own, ready, free = made
    phase = 0
    islot = 0
    iphase = 0
    item = take(items, islot, iphase)
    while item < total * blocks:
        bh, block = place(item, total, blocks, span)
        for half in gl.static_range(2):
            mbarrier.wait(ready.index(half), phase)
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
