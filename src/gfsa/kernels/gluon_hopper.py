"""Backward kernels for Hopper GPUs in Gluon, with the formulas of ``two_pass.py``.

Each number is written by one program, so repeated runs give the same bits; dQ of long sequences of
wide heads, which is added up in any order (``grad_keys``), is the exception. A kernel says itself
when it waits for a product: exponentials are computed while the next products run. No product is in
flight at the end of a step, since the assembler runs all of them one by one where one is. Registers
and shared memory are small enough for three programs on a multiprocessor at head dims up to 64
(four of the first kernel), which fill each other's gaps.

Tokens, logsumexps and δ come by the copy engine, one step ahead; loads begin while products run,
since all warps wait for each other between them. Rows beyond the last token read as zeros: a query
among them adds nothing, since its g, dU and δ are zero.

**Degree 1** (``…_one``) takes seven products, three for dQ, four for dK and dV. Its logsumexps are
those of ``gluon_sweep.py``. With the exclusive term (EXCLUSIVE; formulas
in ``degree_one.py``) dU takes the place of c1·g: the kernel of dQ stores it for the kernel of dK
and dV, which adds the rest of dV to its own rows at its end. Both read A·V in place of the output.
"""

# ruff: noqa: RET505, SIM102, SIM108 - Gluon compiles a subset of Python

from __future__ import annotations

import math

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
    barriers,
    coefficients,
    directed,
    product_layout,
    room_of,
    tile_of,
)

KEY_MASK = gl.constexpr(launching.KEY_MASK)
SPANS = gl.constexpr(launching.SPANS)

# compiled code must not depend on these numbers, nor on the alignment of these tensors
JIT_OPTIONS = {
    "do_not_specialize": ["heads", "mask_b", "mask_h", "mask_j"],
    "do_not_specialize_on_alignment": ["coeffs", "shares", "dc_out", "mask", "sums"],
}


@gluon.jit
def vector_of(room, LENGTH, LAYOUT):
    """A number for each column of a product."""
    return room._reinterpret(gl.float32, [LENGTH], VECTOR).load(gl.SliceLayout(0, LAYOUT))


@gluon.jit
def scores(x, y, total, ADD, D, USED):
    """Begin ``x·yᵀ``, added to ``total`` or not, over the first USED of D features.

    That is one product, or two if not all features are used.
    """
    if USED == D:
        return warpgroup_mma(x, y.permute((1, 0)), total, use_acc=ADD, is_async=True)
    else:
        REST: gl.constexpr = USED - 64
        low = y.slice(0, 64, dim=1).permute((1, 0))
        high = y.slice(64, REST, dim=1).permute((1, 0))
        total = warpgroup_mma(x.slice(0, 64, dim=1), low, total, use_acc=ADD, is_async=True)
        return warpgroup_mma(x.slice(64, REST, dim=1), high, total, is_async=True)


@gluon.jit
def place(heads, BM, LAST_FIRST):
    """A program's ``(first row, sequence, head, head of all sequences, block, blocks, heads)``.

    The last two count the blocks of a head, and the heads of all sequences.

    The grid is (heads of a group, blocks, groups): a block of all heads of the group, then the next
    one. Rows end with short loops, and so does the launch, where whole heads one after another
    would leave the last one's long loops alone at the end.

    Args:
        LAST_FIRST: under causality the longest rows first.
    """
    together = gl.num_programs(0)
    bh = gl.program_id(2) * together + gl.program_id(0)
    block = gl.program_id(1)
    blocks = gl.num_programs(1)
    total = gl.num_programs(2) * together
    if LAST_FIRST:
        block = blocks - 1 - block
    b = bh // heads
    h = bh % heads
    return block * BM, b, h, bh, block, blocks, total


@gluon.constexpr_function
def bytes_of(tensors):
    """What a tile of each tensor has: tokens in 16 bits, or a number in float32 for each."""
    return sum(math.prod(x.block_shape) * (4 if x.block_shape[2] == 1 else 2) for x in tensors)


@gluon.jit
def load(tensors, rooms, OF_KEYS, bars, b, h, group, row, step, pred):
    """Begin to load a tile of each tensor, from token ``row`` on.

    Args:
        rooms: each for one tile, whose barrier is the third; or each a ring of tiles, with a place
            and a barrier for step number ``step``.
        OF_KEYS: whether heads of a group share the tensor.
    """
    if len(rooms[0].shape) == 5:
        now = step % 2
        bar = bars.index(now)
    else:
        bar = bars.index(2)
    mbarrier.expect(bar, bytes_of(tensors), pred=pred)
    for x in gl.static_range(len(tensors)):
        head = h
        if OF_KEYS[x]:
            head = h // group
        room = rooms[x]
        if tensors[x].block_shape[2] == 1:
            at = [b, head, 0, row]
        else:
            at = [b, head, row, 0]
        if len(room.shape) == 5:
            room = room.index(step % 3 if room.shape[0] > 2 else now)
        tma.async_copy_global_to_shared(tensors[x], at, bar, room, pred=pred)


@gluon.jit
def load_next(tensors, rooms, OF_KEYS, bars, b, h, group, col, BN, step, steps):
    """Begin to load the tiles of the step after ``step``, while products of ``step`` run."""
    # all warps are done with the step before
    gl.thread_barrier()
    load(tensors, rooms, OF_KEYS, bars, b, h, group, col + BN, step + 1, step + 1 < steps)
    # here, or the compiler puts one at the next step's start, where nothing runs beside it
    gl.thread_barrier()


@gluon.jit
def store(x, room, tensor, b, h, row, ROWS, D):
    """Begin to store a tile, in 16 bits, by way of shared memory."""
    tile_of(room, ROWS, D).store(x.to(tensor.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(tensor, [b, h, row, 0], room)


@gluon.jit
def queries_of_keys(mask, b, row, n, mask_b, BM, BN, CAUSAL, MASK):
    """Which queries see the BM keys from ``row`` on.

    Returns:
        The first of them, the number of steps of BN that reach the last one, the last query of the
        first key, and the mask of this sequence.
    """
    start = 0
    if CAUSAL:
        start = row
    end = n
    earliest = n
    if MASK == SPANS:
        mask += b.to(gl.int64) * mask_b
        earliest = gl.load(mask + n + row)
        end = gl.load(mask + n + gl.minimum(row + BM, n) - 1) + 1
    return start, gl.cdiv(end - start, BN), earliest, mask


@gluon.jit
def shown_keys(mask, b, h, j, n, mask_b, mask_h, mask_j):
    """Which of the keys ``j`` take part; keys beyond the last one do not."""
    mask += b.to(gl.int64) * mask_b + h.to(gl.int64) * mask_h
    # the stride is the caller's: the last key may lie 2³¹ or more behind the first
    return gl.load(mask + j.to(gl.int64) * mask_j, mask=j < n, other=0) != 0


@gluon.jit
def hide_queries(p, row, col, spans, earliest, n, CAUSAL, MASK):
    """``Aᵀ`` of keys from ``row`` on and queries from ``col`` on, zero where a key is not seen.

    Args:
        spans: first keys of all queries, then last queries of all keys; neither decreases.
        earliest: the last query of the first key, which is the least of these keys' last queries.
    """
    LAYOUT: gl.constexpr = p.type.layout
    BM: gl.constexpr = p.shape[0]
    BN: gl.constexpr = p.shape[1]
    if MASK == SPANS:
        if col + BN - 1 > earliest:
            i = col + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
            j = row + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
            # loaded here, for few tiles: registers are short
            last = gl.load(spans + n + j, mask=j < n, other=-1)
            p = gl.where(i[None, :] <= last[:, None], p, 0.0)
    if CAUSAL:
        if col < row + BM:
            i = col + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
            j = row + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
            p = gl.where(j[:, None] <= i[None, :], p, 0.0)
    return p


@gluon.jit
def keys_of_queries(mask, b, row, n, mask_b, LAYOUT, BM, BN, CAUSAL, MASK):
    """Which keys the BM queries from ``row`` on see.

    Returns:
        The queries, the first of the keys, the number of steps of BN that reach the last one, and
        with spans the queries' first keys and the latest of these.
    """
    end = n
    if CAUSAL:
        end = gl.minimum(row + BM, n)
    start = 0
    i = row + gl.arange(0, BM, layout=LAYOUT)
    first = i
    latest = n
    if MASK == SPANS:
        mask += b.to(gl.int64) * mask_b
        first = gl.load(mask + i, mask=i < n, other=0)
        latest = gl.load(mask + end - 1)
        start = gl.load(mask + row) // BN * BN
    return i, start, gl.cdiv(end - start, BN), first, latest


@gluon.jit
def hide_keys(p, i, row, col, first, latest, shown, n, CAUSAL, MASK):
    """``A`` of queries ``i`` from ``row`` on and keys from ``col`` on, zero where none is seen.

    Args:
        first, latest: see :func:`keys_of_queries`; shown: see :func:`shown_keys`.
    """
    LAYOUT: gl.constexpr = p.type.layout
    BN: gl.constexpr = p.shape[1]
    if MASK == SPANS:
        if col < latest:
            j = col + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
            p = gl.where(j[None, :] >= first[:, None], p, 0.0)
    if CAUSAL:
        if col + BN > row:
            j = col + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
            p = gl.where(j[None, :] <= i[:, None], p, 0.0)
    # keys that take no part, and zeros beyond the last one: the exponential may be infinite
    if MASK == KEY_MASK:
        p = gl.where(shown[None, :], p, 0.0)
    elif not CAUSAL:
        if col + BN > n:
            j = col + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
            p = gl.where((j < n)[None, :], p, 0.0)
    return p


# four numbers of a thread, which lie next to each other
_ADD = gl.constexpr("""{
.reg .u64 at;
mul.wide.u32 at, $5, 4;
add.u64 at, at, $9;
red.relaxed.gpu.global.add.v4.f32 [at], {$1, $2, $3, $4};
mov.u32 $0, 0;
}""")
_GET = gl.constexpr("""{
.reg .u64 at;
mul.wide.u32 at, $4, 4;
add.u64 at, at, $8;
ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [at];
}""")


@gluon.constexpr_function
def query_layout(warps, features):
    """The layout of a tile of dQ of 64 queries: each warpgroup has a part of the features."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, warps // 4], instr_shape=[16, features * 4 // warps, 16]
    )


@gluon.jit
def places(ROWS, D, LAYOUT):
    """Where the numbers of a tile lie: four of a thread next to each other, then the next thread's.

    That is the order in which a product leaves them in registers, so that they do not go through
    shared memory, and an instruction adds four of them: of two rows, eight apart, and of two
    features. The four have one place, that of the first.
    """
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    return (i // 16 * 128 + i % 8 * 16)[:, None] + (d // 8 * (8 * ROWS) + d % 8 // 2 * 4)[None, :]


@gluon.jit
def add(x, at, ROWS, D, LAYOUT):
    """Add a tile to the one that begins at ``at``."""
    gl.inline_asm_elementwise(
        _ADD, "=r,f,f,f,f,r,r,r,r,l,l,l,l", [x, places(ROWS, D, LAYOUT), at.to(gl.int64)],
        dtype=gl.int8, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def get(at, ROWS, D, LAYOUT):
    """The tile that begins at ``at``."""
    return gl.inline_asm_elementwise(
        _GET, "=f,=f,=f,=f,r,r,r,r,l,l,l,l", [places(ROWS, D, LAYOUT), at.to(gl.int64)],
        dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["heads"])
def finish_queries(dq_cols, sums, heads, scale, D: gl.constexpr, BN: gl.constexpr):
    """``dQ = sum·scale`` in 16 bits, for BN queries of one head."""
    LAYOUT: gl.constexpr = query_layout(gl.num_warps(), D)
    tile = gl.program_id(0)
    bh = gl.program_id(1)
    at = sums + (bh.to(gl.int64) * gl.num_programs(0) + tile) * (BN * D)
    dq = get(at, BN, D, LAYOUT) * scale
    stage = room_of(dq_cols)
    tile_of(stage, BN, D).store(dq.to(dq_cols.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(dq_cols, [bh // heads, bh % heads, tile * BN, 0], stage)
    tma.store_wait(0)


@gluon.jit(**JIT_OPTIONS)
def grad_first_pass(
    q_cols, g_cols, lse_cols, k_rows, g_rows, v_rows, u_rows, out_rows, du_rows,
    delta_out, dc_out, coeffs, mask,
    heads, group, n, scale, mask_b, mask_h, mask_j,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr,
    USED: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """``z = Aᵀ·g`` for BM keys, then dU, δ and the coefficients' gradients of these rows."""
    dt: gl.constexpr = q_cols.dtype
    SL: gl.constexpr = product_layout(gl.num_warps(), BN)
    AL: gl.constexpr = product_layout(gl.num_warps(), D)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    gl.static_assert(BM == BN or BM == 2 * BN)
    ks, qs = room_of(k_rows), room_of(q_cols, 2)
    # three are in use at a time
    gs, lss = room_of(g_cols, 3 if BM == BN else 4), room_of(lse_cols, 2)
    bars = barriers(3)
    row, b, h, bh, block, blocks, total = place(heads, BM, False)
    start, steps, earliest, mask = queries_of_keys(mask, b, row, n, mask_b, BM, BN, CAUSAL, MASK)
    load((k_rows,), (ks,), (True,), bars, b, h, group, row, 0, True)
    cols = (q_cols, lse_cols, g_cols)
    rings = (qs, lss, gs)
    OF_KEYS: gl.constexpr = (False, False, False)
    load(cols, rings, OF_KEYS, bars, b, h, group, start, 0, True)
    k = tile_of(ks, BM, D)
    # the first step has no step before it: zeros times zeros
    tile_of(gs.index(2), BN, D).store(gl.full([BN, D], 0.0, dt, AL))
    operand = gl.convert_layout(gl.full([BM, BN], 0.0, dt, SL), PL)
    fence_async_shared()
    mbarrier.wait(bars.index(2), 0)
    gl.thread_barrier()
    z = gl.full([BM, D], 0.0, gl.float32, AL)
    zero = gl.full([BM, BN], 0.0, gl.float32, SL)
    for step in range(steps):
        now = step % 2
        col = start + step * BN
        q = tile_of(qs.index(now), BN, D)
        former_g = tile_of(gs.index((step + 2) % 3), BN, D)
        mbarrier.wait(bars.index(now), (step // 2) & 1)
        s = scores(k, q, zero, False, D, USED)
        z = warpgroup_mma(operand, former_g, z, is_async=True)
        load_next(cols, rings, OF_KEYS, bars, b, h, group, col, BN, step, steps)
        s = warpgroup_mma_wait(1, deps=[s])
        lse = vector_of(lss.index(now), BN, SL) * LOG2E
        p = gl.exp2(s * (scale * LOG2E) - lse[None, :])
        p = hide_queries(p, row, col, mask, earliest, n, CAUSAL, MASK)
        z = warpgroup_mma_wait(0, deps=[z])
        operand = gl.convert_layout(p.to(dt), PL)
    z = warpgroup_mma(operand, tile_of(gs.index((steps - 1) % 3), BN, D), z, is_async=True)
    z = warpgroup_mma_wait(0, deps=[z])
    gl.thread_barrier()
    # rows of g, U, V and the output go where keys, queries and their gradients were
    if BM == BN:
        us = qs.index(0)
        vs = qs.index(1)
        outs = gs.index(0)
    else:
        us = qs._reinterpret(dt, [1, 1, BM, D], u_rows.layout)
        vs = gs._reinterpret(dt, [2, 1, 1, BM, D], v_rows.layout).index(0)
        outs = gs._reinterpret(dt, [2, 1, 1, BM, D], out_rows.layout).index(1)
    own = (g_rows, u_rows, v_rows, out_rows)
    load(own, (ks, us, vs, outs), (False, False, True, False), bars, b, h, group, row, 0, True)
    c0, c1, c2 = coefficients(coeffs, h, 3, 2)
    rows = row + gl.arange(0, BM, layout=gl.SliceLayout(1, AL))
    # rows of keys that take no part hold arbitrary numbers, infinities included
    shown = rows < n
    if MASK == KEY_MASK:
        shown = shown_keys(mask, b, h, rows, n, mask_b, mask_h, mask_j)
    z = gl.where(shown[:, None], z, 0.0)
    mbarrier.wait(bars.index(2), 1)
    u = tile_of(us, BM, D).load(AL).to(gl.float32)
    g = k.load(AL).to(gl.float32)
    zu = gl.sum(z * u, 1)
    gu = gl.sum(g * u, 1)
    gv = gl.sum(g * tile_of(vs, BM, D).load(AL).to(gl.float32), 1)
    go = gl.sum(g * tile_of(outs, BM, D).load(AL).to(gl.float32), 1)
    store(c1 * g + c2 * z, ks, du_rows, b, h, row, BM, D)
    gl.store(delta_out + bh.to(gl.int64) * n + rows, go - c0 * gv + c2 * zu, mask=rows < n)
    # (H, 3, B·blocks): what is added up is contiguous
    parts = total // heads * blocks
    dc = dc_out + h * 3 * parts + b * blocks + block
    gl.store(dc, gl.sum(gv, 0))
    gl.store(dc + parts, gl.sum(gu, 0))
    gl.store(dc + 2 * parts, gl.sum(zu, 0))
    tma.store_wait(0)


@gluon.jit(**JIT_OPTIONS)
def grad_keys(
    q_cols, g_cols, du_cols, lse_cols, delta_cols, k_rows, v_rows, u_rows, g_rows, dk_rows,
    dv_rows, coeffs, mask, sums,
    heads, group, n, scale, mask_b, mask_h, mask_j,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr,
    USED: gl.constexpr, MASK: gl.constexpr, WITH_QUERIES: gl.constexpr,
):  # fmt: skip
    """``dK = dSᵀ·Q·scale`` and ``dV = c0·g + Aᵀ·dU`` for BM keys of one query head.

    Args:
        sums: dQ/scale of all heads, tile by tile, zeros before the launch.
        WITH_QUERIES: whether dQ is added up in them. Then all keys of a block take part, but for
            those that a causal mask hides.
    """
    dt: gl.constexpr = q_cols.dtype
    SL: gl.constexpr = product_layout(gl.num_warps(), BN)
    AL: gl.constexpr = product_layout(gl.num_warps(), D)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    ks, vs, us = room_of(k_rows), room_of(v_rows), room_of(u_rows)
    qs, gs, dus = room_of(q_cols, 2), room_of(g_cols, 2), room_of(du_cols, 2)
    lss, dls = room_of(lse_cols, 2), room_of(delta_cols, 2)
    if WITH_QUERIES:
        QL: gl.constexpr = query_layout(gl.num_warps(), D)
        dss = gl.allocate_shared_memory(dt, [BM, BN], FLAT)
        zero_q = gl.full([BN, D], 0.0, gl.float32, QL)
    bars = barriers(3)
    row, b, h, bh, _, _, _ = place(heads, BM, False)
    sums += bh.to(gl.int64) * gl.cdiv(n, BN) * (BN * D)
    start, steps, earliest, mask = queries_of_keys(mask, b, row, n, mask_b, BM, BN, CAUSAL, MASK)
    own = (k_rows, u_rows, v_rows)
    load(own, (ks, us, vs), (True, False, True), bars, b, h, group, row, 0, True)
    cols = (q_cols, lse_cols, g_cols, du_cols, delta_cols)
    rings = (qs, lss, gs, dus, dls)
    OF_KEYS: gl.constexpr = (False, False, False, False, False)
    load(cols, rings, OF_KEYS, bars, b, h, group, start, 0, True)
    c2 = gl.load(coeffs + h * 3 + 2)
    k = tile_of(ks, BM, D)
    v = tile_of(vs, BM, D)
    u = tile_of(us, BM, D)
    mbarrier.wait(bars.index(2), 0)
    u.store((u.load(AL).to(gl.float32) * c2).to(dt))
    fence_async_shared()
    gl.thread_barrier()
    dk = gl.full([BM, D], 0.0, gl.float32, AL)
    dv = gl.full([BM, D], 0.0, gl.float32, AL)
    zero = gl.full([BM, BN], 0.0, gl.float32, SL)
    for step in range(steps):
        now = step % 2
        col = start + step * BN
        q = tile_of(qs.index(now), BN, D)
        g = tile_of(gs.index(now), BN, D)
        du = tile_of(dus.index(now), BN, D)
        mbarrier.wait(bars.index(now), (step // 2) & 1)
        s = scores(k, q, zero, False, D, USED)
        da = scores(u, g, zero, False, D, USED)
        da = scores(v, du, da, True, D, USED)
        load_next(cols, rings, OF_KEYS, bars, b, h, group, col, BN, step, steps)
        s = warpgroup_mma_wait(2 if USED == D else 4, deps=[s])
        lse = vector_of(lss.index(now), BN, SL) * LOG2E
        p = gl.exp2(s * (scale * LOG2E) - lse[None, :])
        p = hide_queries(p, row, col, mask, earliest, n, CAUSAL, MASK)
        operand = gl.convert_layout(p.to(dt), PL)
        dv = warpgroup_mma(operand, du, dv, is_async=True)
        da = warpgroup_mma_wait(1, deps=[da])
        ds = (p * (da - vector_of(dls.index(now), BN, SL)[None, :])).to(dt)
        if WITH_QUERIES:
            dss.store(ds)
            fence_async_shared()
            gl.thread_barrier()
            dq = warpgroup_mma(dss.permute((1, 0)), k, zero_q, use_acc=False, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, PL), q, dk, is_async=True)
        if WITH_QUERIES:
            dv, dq = warpgroup_mma_wait(1, deps=[dv, dq])
            add(dq, sums + col // BN * (BN * D), BN, D, QL)
            dk = warpgroup_mma_wait(0, deps=[dk])
        else:
            dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
    gl.thread_barrier()
    if MASK == KEY_MASK:
        rows = row + gl.arange(0, BM, layout=gl.SliceLayout(1, AL))
        shown = shown_keys(mask, b, h, rows, n, mask_b, mask_h, mask_j)
        dk = gl.where(shown[:, None], dk, 0.0)
        dv = gl.where(shown[:, None], dv, 0.0)
    # keys, values and U have been used: their room takes g and the results
    load((g_rows,), (us,), (False,), bars, b, h, group, row, 0, True)
    store(dk * scale, ks, dk_rows, b, h, row, BM, D)
    c0 = gl.load(coeffs + h * 3)
    mbarrier.wait(bars.index(2), 1)
    store(dv + c0 * u.load(AL).to(gl.float32), vs, dv_rows, b, h, row, BM, D)
    tma.store_wait(0)


@gluon.jit(**JIT_OPTIONS)
def grad_queries(
    k_cols, v_cols, u_cols, q_rows, g_rows, du_rows, dq_rows,
    delta_in, lse_in, coeffs, mask,
    heads, group, n, scale, mask_b, mask_h, mask_j,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr,
    USED: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """``dQ = dS·K·scale`` for BM queries."""
    dt: gl.constexpr = q_rows.dtype
    SL: gl.constexpr = product_layout(gl.num_warps(), BN)
    AL: gl.constexpr = product_layout(gl.num_warps(), D)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SL)
    qs, gs, dus = room_of(q_rows), room_of(g_rows), room_of(du_rows)
    ks, vs, us = room_of(k_cols, 2), room_of(v_cols, 2), room_of(u_cols, 2)
    bars = barriers(3)
    row, b, h, bh, _, _, _ = place(heads, BM, CAUSAL)
    i, start, steps, first, latest = keys_of_queries(
        mask, b, row, n, mask_b, ROWS, BM, BN, CAUSAL, MASK
    )
    rows = (q_rows, g_rows, du_rows)
    load(rows, (qs, gs, dus), (False, False, False), bars, b, h, group, row, 0, True)
    cols = (k_cols, u_cols, v_cols)
    rings = (ks, us, vs)
    OF_KEYS: gl.constexpr = (True, False, True)
    load(cols, rings, OF_KEYS, bars, b, h, group, start, 0, True)
    c2 = gl.load(coeffs + h * 3 + 2)
    at = bh.to(gl.int64) * n + i
    lse = gl.load(lse_in + at, mask=i < n, other=float("inf")) * LOG2E
    delta = gl.load(delta_in + at, mask=i < n, other=0.0)
    q = tile_of(qs, BM, D)
    g = tile_of(gs, BM, D)
    du = tile_of(dus, BM, D)
    mbarrier.wait(bars.index(2), 0)
    g.store((g.load(AL).to(gl.float32) * c2).to(dt))
    fence_async_shared()
    gl.thread_barrier()
    dq = gl.full([BM, D], 0.0, gl.float32, AL)
    zero = gl.full([BM, BN], 0.0, gl.float32, SL)
    for step in range(steps):
        now = step % 2
        col = start + step * BN
        k = tile_of(ks.index(now), BN, D)
        v = tile_of(vs.index(now), BN, D)
        u = tile_of(us.index(now), BN, D)
        shown = None
        if MASK == KEY_MASK:
            j = col + gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
            shown = shown_keys(mask, b, h, j, n, mask_b, mask_h, mask_j)
        mbarrier.wait(bars.index(now), (step // 2) & 1)
        s = scores(q, k, zero, False, D, USED)
        da = scores(g, u, zero, False, D, USED)
        da = scores(du, v, da, True, D, USED)
        load_next(cols, rings, OF_KEYS, bars, b, h, group, col, BN, step, steps)
        s = warpgroup_mma_wait(2 if USED == D else 4, deps=[s])
        p = gl.exp2(s * (scale * LOG2E) - lse[:, None])
        p = hide_keys(p, i, row, col, first, latest, shown, n, CAUSAL, MASK)
        da = warpgroup_mma_wait(0, deps=[da])
        ds = p * (da - delta[:, None])
        dq = warpgroup_mma(gl.convert_layout(ds.to(dt), PL), k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
    gl.thread_barrier()
    store(dq * scale, qs, dq_rows, b, h, row, BM, D)
    tma.store_wait(0)


@gluon.jit(**JIT_OPTIONS)
def grad_queries_one(
    k_cols, v_cols, q_rows, g_rows, v_rows, out_rows, dq_rows, du_rows,
    delta_out, lse_in, coeffs, shares, mask,
    heads, group, n, scale, mask_b,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr, USED: gl.constexpr,
    POWERS: gl.constexpr, MASK: gl.constexpr, EXCLUSIVE: gl.constexpr,
):  # fmt: skip
    """``dQ = dS·K·scale`` for BM queries, and their δ for the gradients of the keys.

    EXCLUSIVE: ``out_rows`` are A·V, and dU is stored too.
    """
    dt: gl.constexpr = q_rows.dtype
    SL: gl.constexpr = product_layout(gl.num_warps(), BN)
    AL: gl.constexpr = product_layout(gl.num_warps(), D)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SL)
    qs, gs = room_of(q_rows), room_of(g_rows)
    ks, vs = room_of(k_cols, 2), room_of(v_cols, 2)
    bars = barriers(3)
    block = gl.program_id(0)
    if CAUSAL:
        # the longest ones first
        block = gl.num_programs(0) - 1 - block
    bh = gl.program_id(1)
    b = bh // heads
    h = bh % heads
    key_head = h // group
    row = block * BM
    i, start, steps, first, latest = keys_of_queries(
        mask, b, row, n, mask_b, ROWS, BM, BN, CAUSAL, MASK
    )
    # the output and V of these rows go where the keys and values of the second step will be
    gl.static_assert(BM == BN)
    outs = ks.index(1)
    own = vs.index(1)
    rows = (g_rows, out_rows, v_rows, q_rows)
    load(rows, (gs, outs, own, qs), (False, False, True, False), bars, b, h, group, row, 0, True)
    cols = (k_cols, v_cols)
    rings = (ks, vs)
    # of the key head as they are
    OF_KEYS: gl.constexpr = (False, False)
    load(cols, rings, OF_KEYS, bars, b, key_head, group, start, 0, True)
    c0, c1, _ = coefficients(coeffs, h, POWERS, 1)
    if EXCLUSIVE:
        share = gl.load(shares + h)
    length = (n + 15) // 16 * 16
    at = bh.to(gl.int64) * length + i
    lse = gl.load(lse_in + at, mask=i < length, other=float("inf"))
    q = tile_of(qs, BM, D)
    g = tile_of(gs, BM, D)
    mbarrier.wait(bars.index(2), 0)
    rest = tile_of(outs, BM, D).load(AL).to(gl.float32)
    if EXCLUSIVE:
        values, square = directed(tile_of(own, BM, D).load(AL).to(gl.float32))
        du = g.load(AL).to(gl.float32)
        weight = share * gl.sum(du * values, 1) / square
        # products take it in place of g, and δ is that of the rounded numbers
        du = (c1 * du - weight[:, None] * values).to(dt)
        g.store(du)
        delta = gl.convert_layout(gl.sum(du.to(gl.float32) * rest, 1), ROWS)
    else:
        rest = rest - c0 * tile_of(own, BM, D).load(AL).to(gl.float32)
        delta = gl.convert_layout(gl.sum(g.load(AL).to(gl.float32) * rest, 1), ROWS)
    gl.store(delta_out + at, delta, mask=i < length)
    # all have read their rows
    fence_async_shared()
    gl.thread_barrier()
    if EXCLUSIVE:
        tma.async_copy_shared_to_global(du_rows, [b, h, row, 0], gs)
    dq = gl.full([BM, D], 0.0, gl.float32, AL)
    zero = gl.full([BM, BN], 0.0, gl.float32, SL)
    for step in range(steps):
        now = step % 2
        col = start + step * BN
        load(cols, rings, OF_KEYS, bars, b, key_head, group, col + BN, step + 1, step + 1 < steps)
        k = tile_of(ks.index(now), BN, D)
        v = tile_of(vs.index(now), BN, D)
        mbarrier.wait(bars.index(now), (step // 2) & 1)
        s = scores(q, k, zero, False, D, USED)
        da = scores(g, v, zero, False, D, USED)
        s = warpgroup_mma_wait(1 if USED == D else 2, deps=[s])
        p = gl.exp2(s * (scale * LOG2E) - lse[:, None])
        p = hide_keys(p, i, row, col, first, latest, None, n, CAUSAL, MASK)
        da = warpgroup_mma_wait(0, deps=[da])
        if not EXCLUSIVE:
            da = c1 * da
        ds = p * (da - delta[:, None])
        dq = warpgroup_mma(gl.convert_layout(ds.to(dt), PL), k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        gl.thread_barrier()
    store(dq * scale, qs, dq_rows, b, h, row, BM, D)
    tma.store_wait(0)


@gluon.jit(**JIT_OPTIONS)
def grad_keys_one(
    q_cols, g_cols, lse_cols, delta_cols, k_rows, v_rows, g_rows, u_rows, dk_rows, dv_rows,
    dc_out, coeffs, shares, mask,
    heads, group, n, scale, mask_b,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr, USED: gl.constexpr,
    POWERS: gl.constexpr, MASK: gl.constexpr, EXCLUSIVE: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """dK, dV and, if SUMS, the coefficients' gradients of BM keys, for one query head.

    EXCLUSIVE: ``g_cols`` are dU, and ``u_rows``, which are not read otherwise, A·V.
    """
    dt: gl.constexpr = q_cols.dtype
    SL: gl.constexpr = product_layout(gl.num_warps(), BN)
    AL: gl.constexpr = product_layout(gl.num_warps(), D)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    ks, vs = room_of(k_rows), room_of(v_rows)
    qs, gs = room_of(q_cols, 2), room_of(g_cols, 2)
    lss, dls = room_of(lse_cols, 2), room_of(delta_cols, 2)
    bars = barriers(3)
    block = gl.program_id(0)
    blocks = gl.num_programs(0)
    bh = gl.program_id(1)
    b = bh // heads
    h = bh % heads
    row = block * BM
    start, steps, earliest, mask = queries_of_keys(mask, b, row, n, mask_b, BM, BN, CAUSAL, MASK)
    load((k_rows, v_rows), (ks, vs), (True, True), bars, b, h, group, row, 0, True)
    cols = (q_cols, lse_cols, g_cols, delta_cols)
    rings = (qs, lss, gs, dls)
    OF_KEYS: gl.constexpr = (False, False, False, False)
    load(cols, rings, OF_KEYS, bars, b, h, group, start, 0, True)
    c0, c1, _ = coefficients(coeffs, h, POWERS, 1)
    if EXCLUSIVE:
        share = gl.load(shares + h)
    k = tile_of(ks, BM, D)
    v = tile_of(vs, BM, D)
    mbarrier.wait(bars.index(2), 0)
    dk = gl.full([BM, D], 0.0, gl.float32, AL)
    z = gl.full([BM, D], 0.0, gl.float32, AL)
    zero = gl.full([BM, BN], 0.0, gl.float32, SL)
    for step in range(steps):
        now = step % 2
        col = start + step * BN
        load(cols, rings, OF_KEYS, bars, b, h, group, col + BN, step + 1, step + 1 < steps)
        q = tile_of(qs.index(now), BN, D)
        g = tile_of(gs.index(now), BN, D)
        mbarrier.wait(bars.index(now), (step // 2) & 1)
        s = scores(k, q, zero, False, D, USED)
        da = scores(v, g, zero, False, D, USED)
        s = warpgroup_mma_wait(1 if USED == D else 2, deps=[s])
        p = gl.exp2(s * (scale * LOG2E) - vector_of(lss.index(now), BN, SL)[None, :])
        p = hide_queries(p, row, col, mask, earliest, n, CAUSAL, MASK)
        operand = gl.convert_layout(p.to(dt), PL)
        z = warpgroup_mma(operand, g, z, is_async=True)
        da = warpgroup_mma_wait(1, deps=[da])
        if not EXCLUSIVE:
            da = c1 * da
        ds = p * (da - vector_of(dls.index(now), BN, SL)[None, :])
        dk = warpgroup_mma(gl.convert_layout(ds.to(dt), PL), q, dk, is_async=True)
        z, dk = warpgroup_mma_wait(0, deps=[z, dk])
        gl.thread_barrier()
    # the queries' room takes g of these rows, the keys' and values' the results
    gl.static_assert(BM == BN)
    own = qs.index(0)
    us = qs.index(1)
    if EXCLUSIVE:
        load((g_rows, u_rows), (own, us), (False, False), bars, b, h, group, row, 0, True)
    else:
        load((g_rows,), (own,), (False,), bars, b, h, group, row, 0, True)
    store(dk * scale, ks, dk_rows, b, h, row, BM, D)
    # rows beyond the last key hold arbitrary numbers, infinities included
    rows = row + gl.arange(0, BM, layout=gl.SliceLayout(1, AL))
    z = gl.where((rows < n)[:, None], z, 0.0)
    values = v.load(AL).to(gl.float32)
    mbarrier.wait(bars.index(2), 1)
    g = tile_of(own, BM, D).load(AL).to(gl.float32)
    # (H, COUNT, B·blocks): what is added up is contiguous
    COUNT: gl.constexpr = 3 if EXCLUSIVE else 2
    parts = gl.num_programs(1) // heads * blocks
    dc = dc_out + h * COUNT * parts + b * blocks + block
    if SUMS:
        gl.store(dc, gl.sum(gl.sum(g * values, 1), 0))
    if EXCLUSIVE:
        u = tile_of(us, BM, D)
        mixed = u.load(AL).to(gl.float32)
        if SUMS:
            gl.store(dc + parts, gl.sum(gl.sum(g * mixed, 1), 0))
        values, square = directed(values)
        p = gl.sum(mixed * values, 1) / square
        along = gl.sum(g * values, 1)
        if SUMS:
            gl.store(dc + 2 * parts, 0.0 - gl.sum(p * along, 0))
        weight = share * along / square
        # read once more: there are no registers for four tiles of 128 features
        z += (c0 - share * p)[:, None] * tile_of(own, BM, D).load(AL).to(gl.float32)
        rest = u.load(AL).to(gl.float32) - (2.0 * p)[:, None] * v.load(AL).to(gl.float32)
        z -= gl.where((weight != 0.0)[:, None], weight[:, None] * rest, 0.0)
    else:
        if SUMS:
            gl.store(dc + parts, gl.sum(gl.sum(z * values, 1), 0))
        z = c0 * g + c1 * z
    store(z, vs, dv_rows, b, h, row, BM, D)
    tma.store_wait(0)
