r"""Backward kernels of degree 1 for Hopper, with the formulas of ``one_pass.py``.

As those of degree 2 (``gluon_hopper.py``) they compute exponentials while the next products
run, with three programs or more on a multiprocessor, two at a head dim of 128. Seven products:
three for dQ, four for dK and dV.

Logsumexps are to base 2, infinite beyond the last query, and have a multiple of 16 numbers a head,
as those of the forward pass in ``one_pass.py``. Rows beyond the last token read as zeros.

The exclusive term (EXCLUSIVE; formulas in ``degree_one.py``) changes what reaches attention: dU in
place of c1·g. The kernel of dQ computes it from rows that it reads anyway, and stores it for the
kernel of dK and dV, which adds the rest of dV to its own rows at its end. Both read A·V of their
rows in place of the output.

With spans (documents, windows; see :func:`gfsa.kernels.launching.are_spans`) a loop begins at
the first key that the block's first query sees, or ends at the last query that its last key is seen
by.
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

from gfsa.kernels.gluon_hopper import (
    LOG2E,
    SPANS,
    barriers,
    hide_queries,
    queries_of_keys,
    tile_of,
    vector_of,
)
from gfsa.kernels.gluon_short import directed, product_layout

# compiled code must not depend on these numbers, nor on the alignment of these tensors
JIT_OPTIONS = {
    "do_not_specialize": ["heads", "mask_b"],
    "do_not_specialize_on_alignment": ["coeffs", "dc_out", "mask"],
}


@gluon.jit
def _load_keys(
    k_cols, v_cols, ks, vs, bars, b, key_head, col, step, pred, D: gl.constexpr, BN: gl.constexpr
):
    """Begin to load what step number ``step`` of ``grad_queries_one`` takes."""
    now = step % 2
    bar = bars.index(now)
    mbarrier.expect(bar, 2 * BN * D * 2, pred=pred)
    tma.async_copy_global_to_shared(k_cols, [b, key_head, col, 0], bar, ks.index(now), pred=pred)
    tma.async_copy_global_to_shared(v_cols, [b, key_head, col, 0], bar, vs.index(now), pred=pred)


@gluon.jit(**JIT_OPTIONS)
def grad_queries_one(
    k_cols, v_cols, q_rows, g_rows, v_rows, out_rows, dq_rows, du_rows,
    delta_out, lse_in, coeffs, mask,
    heads, group, n, scale, mask_b,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr,
    POWERS: gl.constexpr, MASK: gl.constexpr, EXCLUSIVE: gl.constexpr,
):  # fmt: skip
    """``dQ = dS·K·scale`` for BM queries, and their δ for the gradients of the keys.

    EXCLUSIVE: ``out_rows`` are A·V, and dU is stored too.
    """
    W: gl.constexpr = gl.num_warps()
    dt: gl.constexpr = q_rows.dtype
    SL: gl.constexpr = product_layout(W, BN)
    AL: gl.constexpr = product_layout(W, D)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SL)
    qs = gl.allocate_shared_memory(dt, [1, 1, BM, D], q_rows.layout)
    gs = gl.allocate_shared_memory(dt, [1, 1, BM, D], g_rows.layout)
    ks = gl.allocate_shared_memory(dt, [2, 1, 1, BN, D], k_cols.layout)
    vs = gl.allocate_shared_memory(dt, [2, 1, 1, BN, D], v_cols.layout)
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
    end = n
    if CAUSAL:
        end = gl.minimum(row + BM, n)
    start = 0
    i = row + gl.arange(0, BM, layout=ROWS)
    if MASK == SPANS:
        # first keys of the block's queries, and the latest of them
        mask += b.to(gl.int64) * mask_b
        first = gl.load(mask + i, mask=i < n, other=0)
        latest = gl.load(mask + end - 1)
        start = gl.load(mask + row) // BN * BN
    steps = gl.cdiv(end - start, BN)
    # the output and V of these rows go where the keys and values of the second step will be
    gl.static_assert(BM == BN)
    outs = ks.index(1)
    own = vs.index(1)
    mbarrier.expect(bars.index(2), 4 * BM * D * 2)
    tma.async_copy_global_to_shared(g_rows, [b, h, row, 0], bars.index(2), gs)
    tma.async_copy_global_to_shared(out_rows, [b, h, row, 0], bars.index(2), outs)
    tma.async_copy_global_to_shared(v_rows, [b, key_head, row, 0], bars.index(2), own)
    tma.async_copy_global_to_shared(q_rows, [b, h, row, 0], bars.index(2), qs)
    _load_keys(k_cols, v_cols, ks, vs, bars, b, key_head, start, 0, True, D, BN)
    c0 = gl.load(coeffs + h * POWERS)
    c1 = gl.load(coeffs + h * POWERS + 1)
    length = (n + 15) // 16 * 16
    at = bh.to(gl.int64) * length + i
    lse = gl.load(lse_in + at, mask=i < length, other=float("inf"))
    q = tile_of(qs, BM, D)
    g = tile_of(gs, BM, D)
    mbarrier.wait(bars.index(2), 0)
    rest = tile_of(outs, BM, D).load(AL).to(gl.float32)
    if EXCLUSIVE:
        share = gl.load(coeffs + h * POWERS + 2)
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
        _load_keys(
            k_cols, v_cols, ks, vs, bars, b, key_head, col + BN, step + 1, step + 1 < steps, D, BN
        )
        k = tile_of(ks.index(now), BN, D)
        v = tile_of(vs.index(now), BN, D)
        mbarrier.wait(bars.index(now), (step // 2) & 1)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        da = warpgroup_mma(g, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        p = gl.exp2(s * (scale * LOG2E) - lse[:, None])
        if MASK == SPANS:
            if col < latest:
                j = col + gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
                p = gl.where(j[None, :] >= first[:, None], p, 0.0)
        if CAUSAL:
            if col + BN > row:
                j = col + gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
                p = gl.where(j[None, :] <= i[:, None], p, 0.0)
        elif col + BN > n:
            # zeros beyond the last key: the exponential may be infinite
            j = col + gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
            p = gl.where((j < n)[None, :], p, 0.0)
        da = warpgroup_mma_wait(0, deps=[da])
        if not EXCLUSIVE:
            da = c1 * da
        ds = p * (da - delta[:, None])
        dq = warpgroup_mma(gl.convert_layout(ds.to(dt), PL), k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        gl.thread_barrier()
    q.store((dq * scale).to(dt))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(dq_rows, [b, h, row, 0], qs)
    tma.store_wait(0)


@gluon.jit
def _load_queries(
    q_cols, g_cols, lse_cols, delta_cols, qs, gs, lss, dls, bars, b, h, col, step, pred,
    D: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Begin to load what step number ``step`` of ``grad_keys_one`` takes."""
    now = step % 2
    bar = bars.index(now)
    mbarrier.expect(bar, 2 * BN * D * 2 + 2 * BN * 4, pred=pred)
    tma.async_copy_global_to_shared(q_cols, [b, h, col, 0], bar, qs.index(now), pred=pred)
    tma.async_copy_global_to_shared(lse_cols, [b, h, 0, col], bar, lss.index(now), pred=pred)
    tma.async_copy_global_to_shared(g_cols, [b, h, col, 0], bar, gs.index(now), pred=pred)
    tma.async_copy_global_to_shared(delta_cols, [b, h, 0, col], bar, dls.index(now), pred=pred)


@gluon.jit(**JIT_OPTIONS)
def grad_keys_one(
    q_cols, g_cols, lse_cols, delta_cols, k_rows, v_rows, g_rows, u_rows, dk_rows, dv_rows,
    dc_out, coeffs, mask,
    heads, group, n, scale, mask_b,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr,
    POWERS: gl.constexpr, MASK: gl.constexpr, EXCLUSIVE: gl.constexpr,
):  # fmt: skip
    """dK, dV and the coefficients' gradients of BM keys, for one query head.

    EXCLUSIVE: ``g_cols`` are dU, and ``u_rows``, which are not read otherwise, A·V.
    """
    W: gl.constexpr = gl.num_warps()
    dt: gl.constexpr = q_cols.dtype
    SL: gl.constexpr = product_layout(W, BN)
    AL: gl.constexpr = product_layout(W, D)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    ks = gl.allocate_shared_memory(dt, [1, 1, BM, D], k_rows.layout)
    vs = gl.allocate_shared_memory(dt, [1, 1, BM, D], v_rows.layout)
    qs = gl.allocate_shared_memory(dt, [2, 1, 1, BN, D], q_cols.layout)
    gs = gl.allocate_shared_memory(dt, [2, 1, 1, BN, D], g_cols.layout)
    lss = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 1, BN], lse_cols.layout)
    dls = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 1, BN], delta_cols.layout)
    bars = barriers(3)
    block = gl.program_id(0)
    blocks = gl.num_programs(0)
    bh = gl.program_id(1)
    b = bh // heads
    h = bh % heads
    row = block * BM
    start, steps, earliest, mask = queries_of_keys(mask, b, row, n, mask_b, BM, BN, CAUSAL, MASK)
    mbarrier.expect(bars.index(2), 2 * BM * D * 2)
    tma.async_copy_global_to_shared(k_rows, [b, h // group, row, 0], bars.index(2), ks)
    tma.async_copy_global_to_shared(v_rows, [b, h // group, row, 0], bars.index(2), vs)
    _load_queries(
        q_cols, g_cols, lse_cols, delta_cols, qs, gs, lss, dls, bars, b, h, start, 0, True, D, BN
    )
    c0 = gl.load(coeffs + h * POWERS)
    c1 = gl.load(coeffs + h * POWERS + 1)
    k = tile_of(ks, BM, D)
    v = tile_of(vs, BM, D)
    mbarrier.wait(bars.index(2), 0)
    dk = gl.full([BM, D], 0.0, gl.float32, AL)
    z = gl.full([BM, D], 0.0, gl.float32, AL)
    zero = gl.full([BM, BN], 0.0, gl.float32, SL)
    for step in range(steps):
        now = step % 2
        col = start + step * BN
        _load_queries(
            q_cols, g_cols, lse_cols, delta_cols, qs, gs, lss, dls, bars, b, h, col + BN, step + 1,
            step + 1 < steps, D, BN,
        )  # fmt: skip
        q = tile_of(qs.index(now), BN, D)
        g = tile_of(gs.index(now), BN, D)
        mbarrier.wait(bars.index(now), (step // 2) & 1)
        s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        da = warpgroup_mma(v, g.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
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
    mbarrier.expect(bars.index(2), (2 if EXCLUSIVE else 1) * BM * D * 2)
    tma.async_copy_global_to_shared(g_rows, [b, h, row, 0], bars.index(2), own)
    if EXCLUSIVE:
        tma.async_copy_global_to_shared(u_rows, [b, h, row, 0], bars.index(2), qs.index(1))
    k.store((dk * scale).to(dt))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(dk_rows, [b, h, row, 0], ks)
    # rows beyond the last key hold arbitrary numbers, infinities included
    rows = row + gl.arange(0, BM, layout=gl.SliceLayout(1, AL))
    z = gl.where((rows < n)[:, None], z, 0.0)
    values = v.load(AL).to(gl.float32)
    mbarrier.wait(bars.index(2), 1)
    g = tile_of(own, BM, D).load(AL).to(gl.float32)
    # (H, SUMS, B·blocks): what is added up is contiguous
    SUMS: gl.constexpr = 3 if EXCLUSIVE else 2
    parts = gl.num_programs(1) // heads * blocks
    dc = dc_out + h * SUMS * parts + b * blocks + block
    gl.store(dc, gl.sum(gl.sum(g * values, 1), 0))
    if EXCLUSIVE:
        share = gl.load(coeffs + h * POWERS + 2)
        u = tile_of(qs.index(1), BM, D)
        mixed = u.load(AL).to(gl.float32)
        gl.store(dc + parts, gl.sum(gl.sum(g * mixed, 1), 0))
        values, square = directed(values)
        p = gl.sum(mixed * values, 1) / square
        along = gl.sum(g * values, 1)
        gl.store(dc + 2 * parts, 0.0 - gl.sum(p * along, 0))
        weight = share * along / square
        # read once more: there are no registers for four tiles of 128 features
        z += (c0 - share * p)[:, None] * tile_of(own, BM, D).load(AL).to(gl.float32)
        rest = u.load(AL).to(gl.float32) - (2.0 * p)[:, None] * v.load(AL).to(gl.float32)
        z -= gl.where((weight != 0.0)[:, None], weight[:, None] * rest, 0.0)
    else:
        gl.store(dc + parts, gl.sum(gl.sum(z * values, 1), 0))
        z = c0 * g + c1 * z
    v.store(z.to(dt))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(dv_rows, [b, h, row, 0], vs)
    tma.store_wait(0)
