r"""``U = A·V`` and ``out = c0·V + c1·U + c2·A·U`` in one sweep; of degree 2 under a causal mask.

.. math::
    P = \exp(S_{ij} - m), \qquad O_1 \leftarrow O_1 + P V_j, \qquad
    O_2 \leftarrow O_2 + P U_j \quad (j < i), \\
    U_i = O_1 / l, \qquad O_2 \leftarrow O_2 + P_{ii} U_i, \qquad
    out_i = c_0 V_i + c_1 U_i + c_2 O_2 / l .

Three products a tile, where two passes take four. Query block i needs U of the blocks before it
alone, and its own at the end. A program has two warpgroups of 64 queries each; the products of one
run while the other is at its softmax, and each begins the next tile's scores and this one's sums
before its softmax. Three more warps move tiles.

**Degree 1**, ``out = c0·V + c1·U``, is the same sweep without the second sum: two products a tile,
as attention, with the combination at its end. The exclusive term (EXCLUSIVE; see ``degree_one.py``)
is two sums of each row there. U is written (KEEPS) for the gradient of the exclusive term alone,
which reads it in place of the output. Logsumexps are to base 2, a multiple of 16 of them for each
head, so that the copy engine can read them; those of queries beyond the last one are infinite.

Without causality every query sees all tiles. V of the block's own rows, which under causality is in
the last tile, follows them.

With spans (documents, windows) a block begins at the first tile that its first query sees. Of the
tiles before the diagonal those are masked in which the keys of a query begin. In the others a query
sees all keys or, if its document begins on the diagonal, none: what it has summed up is dropped
there.

**Order.** An item is a block of ROWS queries of one head; with spans and degree 2 a slot of a row's
plan, which has up to two blocks (``sweep.py``). Its program needs the U of the earlier blocks of
the head that its queries see, which other programs make. Programs draw items in the order of their
numbers, so all lower items are finished or belong to programs that run, and waiting for lower items
alone never deadlocks, however few programs the GPU holds at a time. With degree 1 blocks need
nothing of each other: programs take the longest ones first, so that they end at the same time, and
the warp that draws a block reads what it sees. Short or equal blocks are not drawn (DRAWS): each
program takes every so many, which saves a launch that sets the counter to zero.
"""

# ruff: noqa: SIM102, SIM108 - Gluon compiles a subset of Python

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gfsa.kernels import launching
from gfsa.kernels.gluon_short import (
    FLAT,
    LOG2E,
    VECTOR,
    coefficients,
    directed,
    product_layout,
    room_of,
    scores,
)
from gfsa.kernels.sweep import BLOCK, END, FIRST_TILE, LATEST, MASKED_UNTIL, NUMBERS, ORIGIN

SPANS = gl.constexpr(launching.SPANS)
# queries an item, and queries a warpgroup: the flags count by warpgroups
ROWS = gl.constexpr(128)
HALF = gl.constexpr(64)
# flags that are polled together; after the last head's flags are as many numbers, the first of
# which counts the items that were drawn
POLLED = gl.constexpr(32)

# items that are drawn and not finished
QUEUED = gl.constexpr(3)
# what is sent about a block with spans, beside its item's number: its plan, then these
SEQUENCE = gl.constexpr(NUMBERS.value)
HEAD = gl.constexpr(NUMBERS.value + 1)
SENT = gl.constexpr(NUMBERS.value + 2)


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


@gluon.constexpr_function
def is_planned(mask, degree):
    """Whether rows are cut into blocks by a plan."""
    return mask == SPANS and degree == 2


@gluon.jit
def slots_of(blocks, MASK, DEGREE):
    """How many items a head has: its blocks or the slots of its plan."""
    return blocks + (1 if is_planned(MASK, DEGREE) else 0)


@gluon.jit
def following(slot, phase, SLOTS):
    """The next slot of a ring, and the phase of its barriers."""
    slot = slot + 1
    wraps = slot == SLOTS
    return gl.where(wraps, 0, slot), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def released(empty, slot, phase, SLOTS):
    """Give a slot of a ring back; as :func:`following`."""
    mbarrier.arrive(empty.index(slot), count=1)
    return following(slot, phase, SLOTS)


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
    """Send the item that was drawn to the other warps of the program."""
    numbers, full, _ = items
    wait_for_room(items, slot, phase)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers.index(slot).store(gl.full([1], item, gl.int32, layout))
    # one thread arrives, for all that have written
    gl.thread_barrier()
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def send(items, slot, WHICH, number):
    """A number beside the item that is given next, where there is room: :func:`wait_for_room`."""
    numbers, _, _ = items
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers.index((1 + WHICH) * QUEUED + slot).store(gl.full([1], number, gl.int32, layout))


@gluon.jit
def received(items, slot, WHICH):
    """The number that :func:`send` left beside the item that was taken."""
    numbers, _, _ = items
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(numbers.index((1 + WHICH) * QUEUED + slot).load(layout), 0)


@gluon.jit
def place_of(item, items, slot, total, heads, blocks, span, MASK, DEGREE):
    """``(head of all sequences, sequence, head, block, origin)`` of an item."""
    if is_planned(MASK, DEGREE):
        b = received(items, slot, SEQUENCE)
        h = received(items, slot, HEAD)
        bh = b * heads + h
        block = received(items, slot, BLOCK)
        origin = received(items, slot, ORIGIN)
    else:
        bh, block = place(item, total, blocks, span)
        if DEGREE == 1:
            block = blocks - 1 - block
        b = bh // heads
        h = bh % heads
        origin = 0
    return bh, b, h, block, origin


@gluon.jit
def take(items, slot, phase):
    """The item that was given; :func:`next_item` when it is finished."""
    numbers, full, _ = items
    mbarrier.wait(full.index(slot), phase)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(numbers.index(slot).load(layout), 0)


@gluon.jit
def next_item(items, slot, phase):
    """Leave an item's slot to others, and take the next item: its number, its slot and the phase.

    All that :func:`take` and :func:`received` read has to be read before.
    """
    _, _, empty = items
    # One thread arrives on behalf of all warps of the partition, so all of them must have read the
    # slot first. compute-sanitizer's racecheck reports a race between these reads and the next
    # item's writes all the same, as it does for any kernel whose warps hand over by such barriers.
    gl.thread_barrier()
    mbarrier.arrive(empty.index(slot), count=1)
    slot, phase = following(slot, phase, QUEUED)
    return take(items, slot, phase), slot, phase


@gluon.jit
def first_missing(flags, known):
    """The first half block from ``known`` on whose U is not there; earlier ones can be loaded.

    POLLED flags are read. For one warp.
    """
    at = known + gl.arange(0, POLLED, layout=gl.BlockedLayout([1], [32], [1], [0]))
    flag = gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l", [flags + at],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    first = gl.min(gl.where(flag == 0, at, known + POLLED), 0)
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


@gluon.jit
def _load(tensor, b, h, row, barrier, room, slot, TOKENS, D):
    """TOKENS from ``row`` on, as many at a time as the room's parts have."""
    PART: gl.constexpr = room.shape[3]
    PARTS: gl.constexpr = TOKENS // PART
    mbarrier.expect(barrier, TOKENS * D * 2)
    for part in gl.static_range(PARTS):
        tma.async_copy_global_to_shared(
            tensor, [b, h, row + part * PART, 0], barrier, room.index(PARTS * slot + part)
        )


@gluon.jit
def _seen(spans, row, n, TILE):
    """``(first tile, masked until, latest first key)`` of the warpgroup whose queries begin at row.

    As in ``sweep.py``: first keys do not decrease from query to query. Tiles are masked that begin
    before the latest first key of the queries that see a key before the tile on their diagonal.
    """
    # a warpgroup beyond the last query sees what that one does
    last = gl.minimum(row + HALF, n) - 1
    first = gl.load(spans + gl.minimum(row, n - 1))
    latest = gl.load(spans + last)
    before = gl.maximum(gl.minimum(row // TILE * TILE, n) - 1, 0)
    crossing = gl.minimum(gl.load(spans + n + before), last)
    until = gl.load(spans + crossing)
    return first // TILE, gl.where(crossing >= row, until, 0), latest


@gluon.jit
def _send_seen(items, slot, spans, row, n, TILE):
    """Send what a block's two warpgroups see; returns its first tile."""
    # all is loaded before anything is sent, so that loads wait for each other least
    first, until, latest = _seen(spans, row, n, TILE)
    next_first, next_until, next_latest = _seen(spans, row + HALF, n, TILE)
    send(items, slot, FIRST_TILE, first)
    send(items, slot, MASKED_UNTIL, until)
    send(items, slot, LATEST, latest)
    # documents that are out of order may begin before
    send(items, slot, FIRST_TILE + 1, gl.maximum(next_first, first))
    send(items, slot, MASKED_UNTIL + 1, next_until)
    send(items, slot, LATEST + 1, next_latest)
    return first


@gluon.jit
def load_tokens(
    q_in, k_in, v_in, queries, keys, values, items, counter, plan, mask, total, heads, group, n,
    blocks, span, mask_b, TILE, STAGES, D, MASK, DEGREE, CAUSAL, DRAWS,
):  # fmt: skip
    """Draw items, and load their queries and the keys and values that they see."""
    ring = (0, 1, 0, 1, 1)
    islot = 0
    iphase = 1
    item = 0
    if not DRAWS:
        item = gl.program_id(0) - gl.num_programs(0)
    slots = slots_of(blocks, MASK, DEGREE)
    while item < total * slots:
        if DRAWS:
            item = draw(counter)
        else:
            item += gl.num_programs(0)
        if is_planned(MASK, DEGREE):
            bh, slot = place(gl.minimum(item, total * slots - 1), total, slots, span)
            blocks_of_slot = plan + (bh // heads * slots + slot) * 2 * NUMBERS
            # a number that is too high is given once
            for which in range(gl.where(item < total * slots, 0, 1), 2):
                planned = blocks_of_slot + which * NUMBERS
                if (gl.load(planned + END) > 0) | (item >= total * slots):
                    wait_for_room(items, islot, iphase)
                    for number in gl.static_range(NUMBERS):
                        send(items, islot, number, gl.load(planned + number))
                    send(items, islot, SEQUENCE, bh // heads)
                    send(items, islot, HEAD, bh % heads)
                    give(items, item, islot, iphase)
                    islot, iphase = following(islot, iphase, QUEUED)
                    if item < total * slots:
                        ring = _load_item(
                            q_in, k_in, v_in, queries, keys, values, bh,
                            gl.load(planned + ORIGIN), gl.load(planned + BLOCK),
                            gl.load(planned + FIRST_TILE), heads, group, n, ring,
                            TILE, STAGES, D, DEGREE, CAUSAL,
                        )  # fmt: skip
        else:
            begin = 0
            if MASK == SPANS:
                # before it is given; of a number that is too high, what the last item sees
                last = gl.minimum(item, total * blocks - 1)
                _, b, _, block, _ = place_of(
                    last, items, islot, total, heads, blocks, span, MASK, DEGREE
                )
                spans = mask + b.to(gl.int64) * mask_b
                wait_for_room(items, islot, iphase)
                begin = _send_seen(items, islot, spans, block * ROWS, n, TILE)
            # a number that is too high ends the other warps' loops
            give(items, item, islot, iphase)
            islot, iphase = following(islot, iphase, QUEUED)
            if item < total * blocks:
                bh, _, _, block, _ = place_of(
                    item, items, islot, total, heads, blocks, span, MASK, DEGREE
                )
                ring = _load_item(
                    q_in, k_in, v_in, queries, keys, values, bh, 0, block, begin, heads, group, n,
                    ring, TILE, STAGES, D, DEGREE, CAUSAL,
                )  # fmt: skip


@gluon.jit
def _load_item(
    q_in, k_in, v_in, queries, keys, values, bh, origin, block, begin, heads, group, n, ring, TILE,
    STAGES, D, DEGREE, CAUSAL,
):  # fmt: skip
    """Load what one item sees; ``ring`` are the next slot, its phase and that of the queries."""
    qs, qfull, qempty = queries
    ks, kfull, kempty = keys
    vs, vfull, vempty = values
    slot, phase, vslot, vphase, qphase = ring
    b = bh // heads
    h = bh % heads
    mbarrier.wait(qempty.index(0), qphase)
    _load(q_in, b, h, origin + block * ROWS, qfull.index(0), qs, 0, HALF, D)
    if DEGREE == 1:
        mbarrier.wait(qempty.index(1), qphase)
        _load(q_in, b, h, origin + block * ROWS + HALF, qfull.index(1), qs, 1, HALF, D)
    if not CAUSAL:
        tiles = gl.cdiv(n, TILE)
    elif DEGREE == 1:
        tiles = (block + 1) * ROWS // TILE
    else:
        tiles = (2 * block + 2) // (TILE // HALF)
    for tile in range(begin, tiles):
        row = origin + tile * TILE
        mbarrier.wait(kempty.index(slot), phase)
        _load(k_in, b, h // group, row, kfull.index(slot), ks, slot, TILE, D)
        if CAUSAL:
            vslot = slot
            vphase = phase
        mbarrier.wait(vempty.index(vslot), vphase)
        _load(v_in, b, h // group, row, vfull.index(vslot), vs, vslot, TILE, D)
        slot, phase = following(slot, phase, STAGES)
        if not CAUSAL:
            vslot, vphase = following(vslot, vphase, STAGES)
        if DEGREE == 2:
            if tile == begin:
                # late: the first warpgroup begins while the second one ends its last item
                mbarrier.wait(qempty.index(1), qphase)
                _load(q_in, b, h, origin + block * ROWS + HALF, qfull.index(1), qs, 1, HALF, D)
    if not CAUSAL:
        gl.static_assert(TILE == ROWS)
        mbarrier.wait(vempty.index(vslot), vphase)
        _load(v_in, b, h // group, block * ROWS, vfull.index(vslot), vs, vslot, TILE, D)
        vslot, vphase = following(vslot, vphase, STAGES)
    return slot, phase, vslot, vphase, qphase ^ 1


@gluon.jit
def load_passes(
    u_io, passes, vempty, flags, items, total, heads, blocks, span, TILE, STAGES, D, MASK
):  # fmt: skip
    """Load the U of earlier blocks as soon as it is there, into slots beside the values."""
    us, ufull = passes
    PARTS: gl.constexpr = TILE // HALF
    slot = 0
    phase = 1
    islot = 0
    iphase = 0
    slots = slots_of(blocks, MASK, 2)
    item = take(items, islot, iphase)
    while item < total * slots:
        bh, b, h, block, origin = place_of(item, items, islot, total, heads, blocks, span, MASK, 2)
        begin = 0
        if MASK == SPANS:
            begin = received(items, islot, FIRST_TILE)
        missing = begin * PARTS
        for tile in range(begin, (2 * block + 2) // PARTS):
            mbarrier.wait(vempty.index(slot), phase)
            if tile < 2 * block // PARTS:
                while missing < (tile + 1) * PARTS:
                    missing = first_missing(flags + (bh * 2 * blocks + origin // HALF), missing)
                row = origin + tile * TILE
                _load(u_io, b, h, row, ufull.index(slot), us, slot, TILE, D)
            else:
                # the warpgroups make it; the slot's phase goes on
                mbarrier.arrive(ufull.index(slot), count=1)
            slot, phase = following(slot, phase, STAGES)
        item, islot, iphase = next_item(items, islot, iphase)


@gluon.jit
def store_passes(u_io, made, flags, items, total, heads, blocks, span, MASK):
    """Store each half block's U, then set its flag.

    With spans, a half block that is cut short is stored by its warpgroup; no other block needs it.
    """
    own, ready, free = made
    phase = 0
    islot = 0
    iphase = 0
    slots = slots_of(blocks, MASK, 2)
    item = take(items, islot, iphase)
    while item < total * slots:
        bh, b, h, block, origin = place_of(item, items, islot, total, heads, blocks, span, MASK, 2)
        if MASK == SPANS:
            end = received(items, islot, END)
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
        item, islot, iphase = next_item(items, islot, iphase)


@gluon.jit
def _store_half(u_io, own, flag, b, h, row, half):
    tma.async_copy_shared_to_global(u_io, [b, h, row, 0], own.index(half))
    publish(flag)


# registers a thread: the two warpgroups that compute, the warps that copy
COMPUTE_REGISTERS = gl.constexpr(240)
COPY_REGISTERS = gl.constexpr(24)
# the running maximum of a query that has seen no key, below all others: finite, since −inf minus
# −inf is NaN
UNSEEN = gl.constexpr(-1e30)


@gluon.jit
def _tile(room, slot, TOKENS, D):
    """A tile for a matrix product; tiles of fewer tokens lie together where D is 64."""
    gl.static_assert(room.shape[3] == TOKENS or D == 64)
    slots: gl.constexpr = room.shape[0] * room.shape[3] // TOKENS
    return room._reinterpret(room.dtype, [slots, TOKENS, D], FLAT).index(slot)


@gluon.jit
def _scores(q, k, KEYS, D, USED):
    """Begin ``q·kᵀ`` for a tile's first KEYS keys, over the first USED of D features."""
    if USED == D:
        s = scores(q, k, 0, KEYS)
    else:
        # a second product of few features takes less time than one of D
        s = scores(q.slice(0, 64, dim=1), k.slice(0, 64, dim=1), 0, KEYS)
        high = k.slice(0, KEYS).slice(64, USED - 64, dim=1).permute((1, 0))
        s = warpgroup_mma(q.slice(64, USED - 64, dim=1), high, s, is_async=True)
    return s


@gluon.jit
def _masked(s, there, CAUSAL):
    """The last scores of a warpgroup: under causality its last query sees the last key.

    Args:
        there: without causality, how many of the keys there are.
    """
    KEYS: gl.constexpr = s.shape[1]
    LAYOUT: gl.constexpr = product_layout(4, KEYS)
    j = gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    if CAUSAL:
        i = KEYS - HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
        s = gl.where(i[:, None] >= j[None, :], s, float("-inf"))
    elif there < KEYS:
        s = gl.where((j < there)[None, :], s, float("-inf"))
    return s


@gluon.jit
def _first_keys(spans, origin, row, end, KEYS):
    """The first key of each of a warpgroup's queries from the origin, for scores of KEYS keys."""
    i = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, product_layout(4, KEYS)))
    return gl.load(spans + origin + i, mask=i < end, other=0) - origin


@gluon.jit
def _unhidden(s, first, col):
    """Scores of the keys from ``col`` on, without those before a query's first key."""
    LAYOUT: gl.constexpr = product_layout(4, s.shape[1])
    j = col + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    return gl.where(j[None, :] >= first[:, None], s, float("-inf"))


@gluon.jit
def _pass_over(keys, values, passes, kslot, kphase, vslot, vphase, STAGES, DEGREE):
    """Release a tile that the other warpgroup alone sees."""
    _, kfull, kempty = keys
    _, vfull, vempty = values
    mbarrier.wait(kfull.index(kslot), kphase)
    kslot, kphase = released(kempty, kslot, kphase, STAGES)
    mbarrier.wait(vfull.index(vslot), vphase)
    if DEGREE == 2:
        mbarrier.wait(passes[1].index(vslot), vphase)
    vslot, vphase = released(vempty, vslot, vphase, STAGES)
    return kslot, kphase, vslot, vphase


@gluon.jit
def _first_softmax(s, sc, MASK):
    top = gl.max(s, 1) * sc
    if MASK == SPANS:
        top = gl.maximum(top, UNSEEN)
    p = gl.exp2(s * sc - top[:, None])
    return p, top, gl.sum(p, 1)


@gluon.jit
def _softmax(s, top, norm, sc):
    new_top = gl.maximum(top, gl.max(s, 1) * sc)
    p = gl.exp2(s * sc - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    return p, shrink, new_top, norm * shrink + gl.sum(p, 1)


@gluon.jit
def _shrunk(x, shrink, LAYOUT):
    return x * gl.convert_layout(shrink, gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def _store_rows(out, x, b, h, origin, row, end, out_b, out_h, out_i):
    """A warpgroup's rows of a tensor, those before ``end``; both are counted from the origin."""
    LAYOUT: gl.constexpr = product_layout(4, x.shape[1])
    at = out + b.to(gl.int64) * out_b + h.to(gl.int64) * out_h
    rows = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    gl.store(at + (origin + rows)[:, None] * out_i + d[None, :], x, mask=(rows < end)[:, None])


@gluon.jit
def _filter_half(
    queries, keys, values, passes, made, items, u_io, out_io, out, u_out, lse_out, coeffs,
    shares, mask, total, heads, n, scale, blocks, span, out_b, out_h, out_i, mask_b, W, TILE,
    STAGES, D, USED, MASK, CAUSAL, DEGREE, POWERS, KEEPS, EXCLUSIVE,
):  # fmt: skip
    """Warpgroup W's queries of each item: the first or the second 64."""
    qs, qfull, qempty = queries
    ks, kfull, kempty = keys
    vs, vfull, vempty = values
    dt: gl.constexpr = qs.dtype
    PARTS: gl.constexpr = TILE // HALF
    # keys of the last tile that these queries see, up to the diagonal
    LAST: gl.constexpr = HALF * (1 + W * (PARTS - 1)) if CAUSAL else TILE
    # with narrow tiles the second warpgroup sees one more whole tile, the first one's own
    MORE: gl.constexpr = W * (2 - PARTS) if CAUSAL else 0
    O: gl.constexpr = product_layout(4, D)  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O)
    TILE_ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(4, TILE))
    LAST_ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(4, LAST))
    sc = scale * LOG2E
    kslot = 0
    kphase = 0
    vslot = 0
    vphase = 0
    phase = 0
    islot = 0
    iphase = 0
    slots = slots_of(blocks, MASK, DEGREE)
    item = take(items, islot, iphase)
    while item < total * slots:
        bh, b, h, block, origin = place_of(
            item, items, islot, total, heads, blocks, span, MASK, DEGREE
        )
        end = n
        if is_planned(MASK, DEGREE):
            end = received(items, islot, END)
        row = block * ROWS + W * HALF
        # tiles before the diagonal's, or before the last one
        if CAUSAL:
            full = 2 * block // PARTS + MORE
        else:
            full = gl.cdiv(n, TILE) - 1
        there = n - full * TILE
        if MASK == SPANS:
            spans = mask + b.to(gl.int64) * mask_b
            diagonal = row + HALF - LAST
            begin = received(items, islot, FIRST_TILE + W)
            masked_until = received(items, islot, MASKED_UNTIL + W)
            latest = received(items, islot, LATEST + W)
            full -= begin
        if not is_planned(MASK, DEGREE):
            c0, c1, c2 = coefficients(coeffs, h, POWERS, DEGREE)
        if EXCLUSIVE:
            # long before it is used
            share = gl.load(shares + h)
        once = gl.full([HALF, D], 0.0, gl.float32, O)
        if DEGREE == 2:
            us, ufull = passes
            own, ready, free = made
            twice = gl.full([HALF, D], 0.0, gl.float32, O)
        mbarrier.wait(qfull.index(W), phase)
        q = _tile(qs, W, HALF, D)
        if MASK == SPANS and W == 1:
            for _ in range(received(items, islot, FIRST_TILE), begin):
                kslot, kphase, vslot, vphase = _pass_over(
                    keys, values, passes, kslot, kphase, vslot, vphase, STAGES, DEGREE
                )
        mbarrier.wait(kfull.index(kslot), kphase)
        if full > 0:
            s = warpgroup_mma_wait(0, deps=[_scores(q, _tile(ks, kslot, TILE, D), TILE, D, USED)])
            kslot, kphase = released(kempty, kslot, kphase, STAGES)
            if MASK == SPANS:
                if begin * TILE < masked_until:
                    first = _first_keys(spans, origin, row, end, TILE)
                    s = _unhidden(s, first, begin * TILE)
            p, top, norm = _first_softmax(s, sc, MASK)
            a = gl.convert_layout(p.to(dt), P)
            mbarrier.wait(kfull.index(kslot), kphase)
            for step in range(1, full):
                s = _scores(q, _tile(ks, kslot, TILE, D), TILE, D, USED)
                mbarrier.wait(vfull.index(vslot), vphase)
                once = warpgroup_mma(a, _tile(vs, vslot, TILE, D), once, is_async=True)
                if DEGREE == 2:
                    mbarrier.wait(ufull.index(vslot), vphase)
                    twice = warpgroup_mma(a, _tile(us, vslot, TILE, D), twice, is_async=True)
                s = warpgroup_mma_wait(DEGREE, deps=[s])
                kslot, kphase = released(kempty, kslot, kphase, STAGES)
                if MASK == SPANS:
                    if (begin + step) * TILE < masked_until:
                        first = _first_keys(spans, origin, row, end, TILE)
                        s = _unhidden(s, first, (begin + step) * TILE)
                p, shrink, top, norm = _softmax(s, top, norm, sc)
                next_a = gl.convert_layout(p.to(dt), P)
                # for the next tile; here, because the assembler moves no instructions over it,
                # and would move the softmax behind the wait for the products
                mbarrier.wait(kfull.index(kslot), kphase)
                if DEGREE == 2:
                    once, twice, a = warpgroup_mma_wait(0, deps=[once, twice, a])
                else:
                    once, a = warpgroup_mma_wait(0, deps=[once, a])
                vslot, vphase = released(vempty, vslot, vphase, STAGES)
                once = _shrunk(once, shrink, O)
                if DEGREE == 2:
                    twice = _shrunk(twice, shrink, O)
                a = next_a
            s = _scores(q, _tile(ks, kslot, TILE, D), LAST, D, USED)
            mbarrier.wait(vfull.index(vslot), vphase)
            once = warpgroup_mma(a, _tile(vs, vslot, TILE, D), once, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            kslot, kphase = released(kempty, kslot, kphase, STAGES)
            s = _masked(s, there, CAUSAL)
            if MASK == SPANS:
                if latest >= diagonal:
                    first = _first_keys(spans, origin, row, end, LAST)
                    s = _unhidden(s, first, diagonal)
                    # the sums of queries whose keys begin here are of others': they shrink to zero
                    first = gl.convert_layout(first, TILE_ROWS)
                    top = gl.where(first < diagonal, top, UNSEEN)
            p, shrink, last_top, last_norm = _softmax(
                s,
                gl.convert_layout(top, LAST_ROWS),
                gl.convert_layout(norm, LAST_ROWS),
                sc,
            )
            if DEGREE == 1:
                once, a = warpgroup_mma_wait(0, deps=[once, a])
                vslot, vphase = released(vempty, vslot, vphase, STAGES)
                once = _shrunk(once, shrink, O)
            else:
                if MORE == 0:
                    mbarrier.wait(ufull.index(vslot), vphase)
                    twice = warpgroup_mma(a, _tile(us, vslot, TILE, D), twice, is_async=True)
                else:
                    # from the chip
                    mbarrier.wait(ready.index(0), phase)
                    twice = warpgroup_mma(a, _tile(own, 0, HALF, D), twice, is_async=True)
                once, twice, a = warpgroup_mma_wait(0, deps=[once, twice, a])
                if MORE == 1:
                    mbarrier.arrive(free.index(0), count=1)
                mbarrier.arrive(vempty.index(vslot), count=1)
                once = _shrunk(once, shrink, O)
                twice = _shrunk(twice, shrink, O)
                vslot, vphase = following(vslot, vphase, STAGES)
            last = gl.convert_layout(p.to(dt), P)
        else:
            s = warpgroup_mma_wait(0, deps=[_scores(q, _tile(ks, kslot, TILE, D), LAST, D, USED)])
            kslot, kphase = released(kempty, kslot, kphase, STAGES)
            s = _masked(s, there, CAUSAL)
            if MASK == SPANS:
                if latest > diagonal:
                    first = _first_keys(spans, origin, row, end, LAST)
                    s = _unhidden(s, first, diagonal)
            p, last_top, last_norm = _first_softmax(s, sc, MASK)
            last = gl.convert_layout(p.to(dt), P)
        mbarrier.arrive(qempty.index(W), count=1)
        mbarrier.wait(vfull.index(vslot), vphase)
        v = _tile(vs, vslot, TILE, D)
        once = warpgroup_mma(last, v.slice(0, LAST), once, is_async=True)
        if is_planned(MASK, DEGREE):
            # here, where products run: they are waited for at once
            c0, c1, c2 = coefficients(coeffs, h, POWERS, DEGREE)
        inverse = gl.convert_layout(1.0 / last_norm, O_ROWS)
        if DEGREE == 1:
            rows = row + gl.arange(0, HALF, layout=LAST_ROWS)
            lse = last_top + gl.log2(last_norm)
            length = (n + 15) // 16 * 16
            lse = gl.where(rows < n, lse, float("inf"))
            gl.store(lse_out + bh.to(gl.int64) * length + rows, lse, mask=rows < length)
            once, last = warpgroup_mma_wait(0, deps=[once, last])
            once = once * inverse[:, None]
            # what was stored last has left its room
            tma.store_wait(0)
            gl.thread_barrier()
            if KEEPS:
                _tile(made, 2 + W, HALF, D).store(once.to(dt))
            if CAUSAL:
                v = v.slice(LAST - HALF, HALF)
            else:
                vslot, vphase = released(vempty, vslot, vphase, STAGES)
                mbarrier.wait(vfull.index(vslot), vphase)
                v = _tile(vs, vslot, TILE, D).slice(W * HALF, HALF)
            value = v.load(O).to(gl.float32)
            y = c1 * once + c0 * value
            if EXCLUSIVE:
                value, square = directed(value)
                y -= (share * gl.sum(once * value, 1) / square)[:, None] * value
            _tile(made, W, HALF, D).store(y.to(dt))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(out_io, [b, h, row, 0], made.index(W))
            if KEEPS:
                tma.async_copy_shared_to_global(u_io, [b, h, row, 0], made.index(2 + W))
        else:
            once, last = warpgroup_mma_wait(0, deps=[once, last])
            # rounded as it is saved: the gradient tells c2·A·U from out, V and U
            u = (once * inverse[:, None]).to(dt)
            mbarrier.wait(free.index(W), phase ^ 1)
            if MASK == SPANS:
                if row + HALF > end:
                    _store_rows(u_out, u, b, h, origin, row, end, out_b, out_h, out_i)
            _tile(own, W, HALF, D).store(u)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(ready.index(W), count=1)
            if MASK == SPANS and MORE == 1:
                if full == 0:
                    # its U is not looked at, but what is free is counted
                    mbarrier.wait(ready.index(0), phase)
                    mbarrier.arrive(free.index(0), count=1)
            if LAST == HALF:
                twice = warpgroup_mma(last, _tile(own, W, HALF, D), twice, is_async=True)
            else:
                # the first warpgroup's before its own
                mbarrier.wait(ready.index(0), phase)
                twice = warpgroup_mma(last, _tile(own, 0, LAST, D), twice, is_async=True)
            once = c1 * u.to(gl.float32) + c0 * v.slice(LAST - HALF, HALF).load(O).to(gl.float32)
            rows = row + gl.arange(0, HALF, layout=LAST_ROWS)
            lse = (last_top + gl.log2(last_norm)) / LOG2E
            gl.store(lse_out + bh.to(gl.int64) * n + origin + rows, lse, mask=rows < end)
            twice, last = warpgroup_mma_wait(0, deps=[twice, last])
            if LAST > HALF:
                mbarrier.arrive(free.index(0), count=1)
            y = once + twice * (c2 * inverse)[:, None]
            _store_rows(out, y.to(dt), b, h, origin, row, end, out_b, out_h, out_i)
            if W == 0:
                # nothing was loaded, but the warp that loads U must not fall behind the slot's
                # phases
                mbarrier.wait(ufull.index(vslot), vphase)
        # only now: loads of v that are on their way do not hold the copy engine back
        vslot, vphase = released(vempty, vslot, vphase, STAGES)
        if CAUSAL and W == 0 and PARTS == 1:
            # the tile that the second warpgroup alone sees
            kslot, kphase, vslot, vphase = _pass_over(
                keys, values, passes, kslot, kphase, vslot, vphase, STAGES, DEGREE
            )
        phase = phase ^ 1
        item, islot, iphase = next_item(items, islot, iphase)
    if DEGREE == 1:
        tma.store_wait(0)


@gluon.jit
def _barriers(COUNT):
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit(
    do_not_specialize=["total", "heads", "n", "blocks", "span", "mask_b"],
    do_not_specialize_on_alignment=["coeffs", "shares", "mask"],
)
def filter_sweep(
    q_in, k_in, v_in, u_io, out_io, out, u_out, lse_out, coeffs, shares, flags, mask,
    total, heads, group, n, scale, blocks, span, out_b, out_h, out_i, mask_b,
    D: gl.constexpr, USED: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    MASK: gl.constexpr, CAUSAL: gl.constexpr, DRAWS: gl.constexpr, DEGREE: gl.constexpr,
    POWERS: gl.constexpr, KEEPS: gl.constexpr, EXCLUSIVE: gl.constexpr,
):  # fmt: skip
    """``total`` heads of ``blocks`` blocks; ``flags``, and the counter after them, are zero.

    USED: features of D that products read. MASK: none, or ``mask`` are spans, see
    :func:`gfsa.kernels.launching.are_spans`. TILE: 64 or 128 keys. STAGES: tiles of keys, values
    and U that are on the chip at a time. With degree 1 there is a counter at most, ``out_io`` is
    written and not ``out``, and KEEPS stores ``A·V`` too.
    """
    qs = room_of(q_in, 2)
    # a tile is moved in as many parts
    PARTS: gl.constexpr = 1 if DEGREE == 1 else TILE // HALF
    ks, vs = room_of(k_in, PARTS * STAGES), room_of(v_in, PARTS * STAGES)
    if DEGREE == 1:
        made = room_of(out_io, 4 if KEEPS else 2)
    else:
        us, own = room_of(u_io, PARTS * STAGES), room_of(u_io, 2)
    KEPT: gl.constexpr = QUEUED * (1 + SENT if MASK == SPANS else 1)
    numbers = gl.allocate_shared_memory(gl.int32, [KEPT, 1], VECTOR)
    qfull, qempty = _barriers(2), _barriers(2)
    kfull, kempty = _barriers(STAGES), _barriers(STAGES)
    vfull, vempty = _barriers(STAGES), _barriers(STAGES)
    passes = ()
    if DEGREE == 2:
        ufull, ready, free = _barriers(STAGES), _barriers(2), _barriers(2)
        passes = (us, ufull)
        made = (own, ready, free)
    given, done = _barriers(QUEUED), _barriers(QUEUED)
    for w in gl.static_range(2):
        mbarrier.init(qfull.index(w), count=1)
        mbarrier.init(qempty.index(w), count=1)
        if DEGREE == 2:
            mbarrier.init(ready.index(w), count=1)
            # when it is stored and, of the first warpgroup's, the second one's product is done
            mbarrier.init(free.index(w), count=2 - w)
    for slot in gl.static_range(STAGES):
        mbarrier.init(kfull.index(slot), count=1)
        mbarrier.init(kempty.index(slot), count=2)
        mbarrier.init(vfull.index(slot), count=1)
        mbarrier.init(vempty.index(slot), count=2)
        if DEGREE == 2:
            mbarrier.init(ufull.index(slot), count=1)
    for slot in gl.static_range(QUEUED):
        mbarrier.init(given.index(slot), count=1)
        mbarrier.init(done.index(slot), count=2 * DEGREE)
    fence_async_shared()
    gl.thread_barrier()
    queries = (qs, qfull, qempty)
    keys = (ks, kfull, kempty)
    values = (vs, vfull, vempty)
    items = (numbers, given, done)
    counter = flags
    if DEGREE == 2:
        counter += total * blocks * 2
    plan = counter + POLLED
    FIRST: gl.constexpr = gl.constexpr(0)
    SECOND: gl.constexpr = gl.constexpr(1)
    # the last two copy U, which degree 1 does not
    gl.warp_specialize(
        [
            (_filter_half, (
                queries, keys, values, passes, made, items, u_io, out_io, out, u_out, lse_out,
                coeffs, shares, mask, total, heads, n, scale, blocks, span, out_b, out_h,
                out_i, mask_b, FIRST, TILE, STAGES, D, USED, MASK, CAUSAL, DEGREE, POWERS, KEEPS,
                EXCLUSIVE,
            )),
            (_filter_half, (
                queries, keys, values, passes, made, items, u_io, out_io, out, u_out, lse_out,
                coeffs, shares, mask, total, heads, n, scale, blocks, span, out_b, out_h,
                out_i, mask_b, SECOND, TILE, STAGES, D, USED, MASK, CAUSAL, DEGREE, POWERS, KEEPS,
                EXCLUSIVE,
            )),
            (load_tokens, (
                q_in, k_in, v_in, queries, keys, values, items, counter, plan, mask,
                total, heads, group, n, blocks, span, mask_b, TILE, STAGES, D, MASK, DEGREE, CAUSAL,
                DRAWS,
            )),
            (load_passes, (
                u_io, passes, values[2], flags, items, total, heads, blocks, span,
                TILE, STAGES, D, MASK,
            )),
            (store_passes, (u_io, made, flags, items, total, heads, blocks, span, MASK)),
        ][: 2 * DEGREE + 1],
        [4, 1, 1, 1][: 2 * DEGREE],
        [COMPUTE_REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS][: 2 * DEGREE],
    )  # fmt: skip
