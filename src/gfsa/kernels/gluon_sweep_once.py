r"""``out = c0·V + c1·A·V`` under a causal mask: attention with the combination at its end.

The exclusive term (EXCLUSIVE; see ``degree_one.py``) is two sums of each row at that end.

A program has two warpgroups of 64 queries each, as in ``gluon_sweep.py``; the products of one run
while the other is at its softmax. One more warp loads tiles. Blocks are drawn in order, the longest
ones first, so that programs end at the same time.

With spans (documents, windows) a block begins at the first tile that its first query sees, and
tiles before the diagonal are masked as in ``gluon_sweep.py``. Blocks need nothing of each other, so
no plan cuts rows at documents: the warp that draws a block reads what it sees, and tells the
others.
"""

# ruff: noqa: SIM102 - Gluon compiles a subset of Python

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

from gfsa.kernels.gluon_short import LOG2E, directed, product_layout
from gfsa.kernels.gluon_sweep import (
    COMPUTE_REGISTERS,
    COPY_REGISTERS,
    DRAWN,
    HALF,
    ROWS,
    SPANS,
    UNSEEN,
    _first_keys,
    _first_softmax,
    _masked,
    _scores,
    _softmax,
    _unhidden,
    done_with,
    draw,
    following,
    give,
    place,
    take,
    tell,
    told,
    wait_for_room,
)

# what is told of a block with spans, after its item's number: by warpgroup its first tile, before
# which key tiles are masked, and the latest of its queries' first keys
FIRST_TILE = gl.constexpr(1)
MASKED_UNTIL = gl.constexpr(3)
LATEST = gl.constexpr(5)
TOLD = gl.constexpr(7)


@gluon.jit
def _tile(room, slot, TOKENS: gl.constexpr, D: gl.constexpr):
    """Shared memory of one tile as a matrix."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return room.index(slot)._reinterpret(room.dtype, [TOKENS, D], layout)


@gluon.jit
def _seen(spans, row, n, TILE: gl.constexpr):
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
def _tell_seen(items, slot, spans, row, n, TILE: gl.constexpr):
    """Tell what a block's two warpgroups see; returns its first tile."""
    # all is loaded before anything is told, so that loads wait for each other least
    first, until, latest = _seen(spans, row, n, TILE)
    next_first, next_until, next_latest = _seen(spans, row + HALF, n, TILE)
    tell(items, slot, FIRST_TILE, first)
    tell(items, slot, MASKED_UNTIL, until)
    tell(items, slot, LATEST, latest)
    # documents that are out of order may begin before
    tell(items, slot, FIRST_TILE + 1, gl.maximum(next_first, first))
    tell(items, slot, MASKED_UNTIL + 1, next_until)
    tell(items, slot, LATEST + 1, next_latest)
    return first


@gluon.jit
def _load_tokens(
    q_in, k_in, v_in, queries, keys, values, items, counter, mask,
    total, heads, group, n, blocks, span, mask_b,
    TILE: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, MASK: gl.constexpr,
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
    while item < total * blocks:
        item = draw(counter)
        begin = 0
        if MASK == SPANS:
            # before it is given; of a number that is too high, what the last item sees
            bh, place_in_head = place(gl.minimum(item, total * blocks - 1), total, blocks, span)
            spans = mask + (bh // heads).to(gl.int64) * mask_b
            row = (blocks - 1 - place_in_head) * ROWS
            wait_for_room(items, islot, iphase)
            begin = _tell_seen(items, islot, spans, row, n, TILE)
        # a number that is too high ends the other warps' loops
        give(items, item, islot, iphase)
        islot, iphase = following(islot, iphase, DRAWN)
        if item < total * blocks:
            bh, place_in_head = place(item, total, blocks, span)
            block = blocks - 1 - place_in_head
            b = bh // heads
            h = bh % heads
            for half in gl.static_range(2):
                mbarrier.wait(qempty.index(half), qphase)
                mbarrier.expect(qfull.index(half), HALF * D * 2)
                tma.async_copy_global_to_shared(
                    q_in, [b, h, block * ROWS + half * HALF, 0], qfull.index(half), qs.index(half)
                )
            for tile in range(begin, (block + 1) * ROWS // TILE):
                row = tile * TILE
                mbarrier.wait(kempty.index(slot), phase)
                mbarrier.expect(kfull.index(slot), TILE * D * 2)
                tma.async_copy_global_to_shared(
                    k_in, [b, h // group, row, 0], kfull.index(slot), ks.index(slot)
                )
                mbarrier.wait(vempty.index(slot), phase)
                mbarrier.expect(vfull.index(slot), TILE * D * 2)
                tma.async_copy_global_to_shared(
                    v_in, [b, h // group, row, 0], vfull.index(slot), vs.index(slot)
                )
                slot, phase = following(slot, phase, STAGES)
            qphase = qphase ^ 1


@gluon.jit
def _shrunk(once, shrink, LAYOUT: gl.constexpr):
    return once * gl.convert_layout(shrink, gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def _pass_over(keys, values, kslot, kphase, vslot, vphase, STAGES: gl.constexpr):
    """Release a tile that the other warpgroup alone sees."""
    _, kfull, kempty = keys
    _, vfull, vempty = values
    mbarrier.wait(kfull.index(kslot), kphase)
    mbarrier.arrive(kempty.index(kslot), count=1)
    kslot, kphase = following(kslot, kphase, STAGES)
    mbarrier.wait(vfull.index(vslot), vphase)
    mbarrier.arrive(vempty.index(vslot), count=1)
    vslot, vphase = following(vslot, vphase, STAGES)
    return kslot, kphase, vslot, vphase


@gluon.jit
def _attend_half(
    queries, keys, values, made, items, u_io, out_io, lse_out, coeffs, mask,
    total, heads, n, scale, blocks, span, mask_b,
    W: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    POWERS: gl.constexpr, KEEPS: gl.constexpr, NATURAL: gl.constexpr, MASK: gl.constexpr,
    EXCLUSIVE: gl.constexpr,
):  # fmt: skip
    """Warpgroup W's queries of each item: the first or the second 64."""
    qs, qfull, qempty = queries
    ks, kfull, kempty = keys
    vs, vfull, vempty = values
    dt: gl.constexpr = qs.dtype
    PARTS: gl.constexpr = TILE // HALF
    # keys of the last tile that these queries see, up to the diagonal
    LAST: gl.constexpr = HALF * (1 + W * (PARTS - 1))
    # with narrow tiles the second warpgroup sees one more whole tile, the first one's own
    MORE: gl.constexpr = W * (2 - PARTS)
    O: gl.constexpr = product_layout(4, D)  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
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
    item = take(items, islot, iphase)
    while item < total * blocks:
        bh, place_in_head = place(item, total, blocks, span)
        block = blocks - 1 - place_in_head
        b = bh // heads
        h = bh % heads
        row = block * ROWS + W * HALF
        # tiles before the diagonal's
        full = 2 * block // PARTS + MORE
        if MASK == SPANS:
            spans = mask + b.to(gl.int64) * mask_b
            diagonal = row + HALF - LAST
            begin = told(items, islot, FIRST_TILE + W)
            masked_until = told(items, islot, MASKED_UNTIL + W)
            latest = told(items, islot, LATEST + W)
            full -= begin
        c0 = gl.load(coeffs + h * POWERS)
        c1 = gl.load(coeffs + h * POWERS + 1)
        once = gl.full([HALF, D], 0.0, gl.float32, O)
        mbarrier.wait(qfull.index(W), phase)
        q = _tile(qs, W, HALF, D)
        if MASK == SPANS and W == 1:
            for _ in range(told(items, islot, FIRST_TILE), begin):
                kslot, kphase, vslot, vphase = _pass_over(
                    keys, values, kslot, kphase, vslot, vphase, STAGES
                )
        mbarrier.wait(kfull.index(kslot), kphase)
        if full > 0:
            s = warpgroup_mma_wait(0, deps=[_scores(q, _tile(ks, kslot, TILE, D), TILE)])
            mbarrier.arrive(kempty.index(kslot), count=1)
            kslot, kphase = following(kslot, kphase, STAGES)
            if MASK == SPANS:
                if begin * TILE < masked_until:
                    first = _first_keys(spans, 0, row, n, TILE)
                    s = _unhidden(s, first, begin * TILE)
            p, top, norm = _first_softmax(s, sc, MASK)
            a = gl.convert_layout(p.to(dt), P)
            mbarrier.wait(kfull.index(kslot), kphase)
            for step in range(1, full):
                s = _scores(q, _tile(ks, kslot, TILE, D), TILE)
                mbarrier.wait(vfull.index(vslot), vphase)
                once = warpgroup_mma(a, _tile(vs, vslot, TILE, D), once, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                mbarrier.arrive(kempty.index(kslot), count=1)
                kslot, kphase = following(kslot, kphase, STAGES)
                if MASK == SPANS:
                    if (begin + step) * TILE < masked_until:
                        first = _first_keys(spans, 0, row, n, TILE)
                        s = _unhidden(s, first, (begin + step) * TILE)
                p, shrink, top, norm = _softmax(s, top, norm, sc)
                next_a = gl.convert_layout(p.to(dt), P)
                # for the next tile; here, because the assembler moves no instructions over it,
                # and would move the softmax behind the wait for the products
                mbarrier.wait(kfull.index(kslot), kphase)
                once, a = warpgroup_mma_wait(0, deps=[once, a])
                mbarrier.arrive(vempty.index(vslot), count=1)
                vslot, vphase = following(vslot, vphase, STAGES)
                once = _shrunk(once, shrink, O)
                a = next_a
            s = _scores(q, _tile(ks, kslot, TILE, D), LAST)
            mbarrier.wait(vfull.index(vslot), vphase)
            once = warpgroup_mma(a, _tile(vs, vslot, TILE, D), once, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(kempty.index(kslot), count=1)
            kslot, kphase = following(kslot, kphase, STAGES)
            s = _masked(s)
            if MASK == SPANS:
                if latest >= diagonal:
                    first = _first_keys(spans, 0, row, n, LAST)
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
            once, a = warpgroup_mma_wait(0, deps=[once, a])
            mbarrier.arrive(vempty.index(vslot), count=1)
            vslot, vphase = following(vslot, vphase, STAGES)
            once = _shrunk(once, shrink, O)
            last = gl.convert_layout(p.to(dt), P)
        else:
            s = warpgroup_mma_wait(0, deps=[_scores(q, _tile(ks, kslot, TILE, D), LAST)])
            mbarrier.arrive(kempty.index(kslot), count=1)
            kslot, kphase = following(kslot, kphase, STAGES)
            s = _masked(s)
            if MASK == SPANS:
                if latest > diagonal:
                    first = _first_keys(spans, 0, row, n, LAST)
                    s = _unhidden(s, first, diagonal)
            p, last_top, last_norm = _first_softmax(s, sc, MASK)
            last = gl.convert_layout(p.to(dt), P)
        mbarrier.arrive(qempty.index(W), count=1)
        mbarrier.wait(vfull.index(vslot), vphase)
        v = _tile(vs, vslot, TILE, D)
        once = warpgroup_mma(last, v.slice(0, LAST), once, is_async=True)
        inverse = gl.convert_layout(1.0 / last_norm, gl.SliceLayout(1, O))
        rows = row + gl.arange(0, HALF, layout=LAST_ROWS)
        lse = last_top + gl.log2(last_norm)
        if NATURAL:
            lse = lse / LOG2E
            gl.store(lse_out + bh.to(gl.int64) * n + rows, lse, mask=rows < n)
        else:
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
        own = v.slice(LAST - HALF, HALF).load(O).to(gl.float32)
        y = c1 * once + c0 * own
        if EXCLUSIVE:
            own, square = directed(own)
            share = gl.load(coeffs + h * POWERS + 2)
            y -= (share * gl.sum(once * own, 1) / square)[:, None] * own
        _tile(made, W, HALF, D).store(y.to(dt))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out_io, [b, h, row, 0], made.index(W))
        if KEEPS:
            tma.async_copy_shared_to_global(u_io, [b, h, row, 0], made.index(2 + W))
        # only now: loads of v that are on their way do not hold the copy engine back
        mbarrier.arrive(vempty.index(vslot), count=1)
        vslot, vphase = following(vslot, vphase, STAGES)
        if W == 0 and PARTS == 1:
            # the tile that the second warpgroup alone sees
            kslot, kphase, vslot, vphase = _pass_over(
                keys, values, kslot, kphase, vslot, vphase, STAGES
            )
        phase = phase ^ 1
        done_with(items, islot)
        islot, iphase = following(islot, iphase, DRAWN)
        item = take(items, islot, iphase)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["total", "heads", "n", "blocks", "span", "mask_b"],
    do_not_specialize_on_alignment=["coeffs", "mask"],
)
def attend_sweep(
    q_in, k_in, v_in, u_io, out_io, lse_out, coeffs, counter, mask,
    total, heads, group, n, scale, blocks, span, mask_b,
    D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, POWERS: gl.constexpr,
    KEEPS: gl.constexpr, NATURAL: gl.constexpr, MASK: gl.constexpr, EXCLUSIVE: gl.constexpr,
):  # fmt: skip
    """``total`` heads of ``blocks`` blocks; ``counter`` is zero.

    TILE: 64 or 128 keys. STAGES: tiles of keys and values that are on the chip at a time. KEEPS:
    ``A·V`` is stored too. NATURAL: logsumexps are natural, as cuDNN's gradient takes them; without
    it they are to base 2, as ``one_pass.py`` describes them. MASK: none, or ``mask`` are
    spans, see :func:`gfsa.kernels.launching.are_spans`.
    """
    dt: gl.constexpr = q_in.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    NUMBER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    qs = gl.allocate_shared_memory(dt, [2, 1, 1, HALF, D], q_in.layout)
    ks = gl.allocate_shared_memory(dt, [STAGES, 1, 1, TILE, D], k_in.layout)
    vs = gl.allocate_shared_memory(dt, [STAGES, 1, 1, TILE, D], v_in.layout)
    made = gl.allocate_shared_memory(dt, [4 if KEEPS else 2, 1, 1, HALF, D], out_io.layout)
    NUMBERS: gl.constexpr = DRAWN * (TOLD if MASK == SPANS else 1)
    numbers = gl.allocate_shared_memory(gl.int32, [NUMBERS, 1], NUMBER)
    qfull = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    qempty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    kfull = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    kempty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    vfull = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    vempty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    given = gl.allocate_shared_memory(gl.int64, [DRAWN, 1], BARRIER)
    done = gl.allocate_shared_memory(gl.int64, [DRAWN, 1], BARRIER)
    for w in gl.static_range(2):
        mbarrier.init(qfull.index(w), count=1)
        mbarrier.init(qempty.index(w), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(kfull.index(slot), count=1)
        mbarrier.init(kempty.index(slot), count=2)
        mbarrier.init(vfull.index(slot), count=1)
        mbarrier.init(vempty.index(slot), count=2)
    for slot in gl.static_range(DRAWN):
        mbarrier.init(given.index(slot), count=1)
        mbarrier.init(done.index(slot), count=2)
    fence_async_shared()
    gl.thread_barrier()
    queries = (qs, qfull, qempty)
    keys = (ks, kfull, kempty)
    values = (vs, vfull, vempty)
    items = (numbers, given, done)
    FIRST: gl.constexpr = gl.constexpr(0)
    SECOND: gl.constexpr = gl.constexpr(1)
    gl.warp_specialize(
        [
            (_attend_half, (
                queries, keys, values, made, items, u_io, out_io, lse_out, coeffs, mask,
                total, heads, n, scale, blocks, span, mask_b,
                FIRST, TILE, STAGES, D, POWERS, KEEPS, NATURAL, MASK, EXCLUSIVE,
            )),
            (_attend_half, (
                queries, keys, values, made, items, u_io, out_io, lse_out, coeffs, mask,
                total, heads, n, scale, blocks, span, mask_b,
                SECOND, TILE, STAGES, D, POWERS, KEEPS, NATURAL, MASK, EXCLUSIVE,
            )),
            (_load_tokens, (
                q_in, k_in, v_in, queries, keys, values, items, counter, mask,
                total, heads, group, n, blocks, span, mask_b, TILE, STAGES, D, MASK,
            )),
        ],
        [4, 1],
        [COMPUTE_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
