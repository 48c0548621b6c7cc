"""``dQ = dS·K·scale``, a block of queries a program."""

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

from gfsa.kernels.hopper.tiles import (
    JIT_OPTIONS,
    KEY_MASK,
    LOG2E,
    SPANS,
    barriers,
    place,
    scores,
    shown_keys,
    tile_of,
)
from gfsa.kernels.short.tiles import product_layout


@gluon.jit
def _load_step(
    k_cols, v_cols, u_cols, ks, vs, us, bars, b, h, group, col, step, pred,
    D: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Begin to load what step number ``step`` of ``grad_queries`` takes."""
    now = step % 2
    bar = bars.index(now)
    mbarrier.expect(bar, 3 * BN * D * 2, pred=pred)
    key = h // group
    tma.async_copy_global_to_shared(k_cols, [b, key, col, 0], bar, ks.index(now), pred=pred)
    tma.async_copy_global_to_shared(u_cols, [b, h, col, 0], bar, us.index(now), pred=pred)
    tma.async_copy_global_to_shared(v_cols, [b, key, col, 0], bar, vs.index(now), pred=pred)


@gluon.jit(**JIT_OPTIONS)
def grad_queries(
    k_cols, v_cols, u_cols, q_rows, g_rows, du_rows, dq_rows,
    delta_in, lse_in, coeffs, mask,
    heads, group, n, scale, mask_b, mask_h, mask_j,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr,
    USED: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """``dQ = dS·K·scale`` for BM queries."""
    W: gl.constexpr = gl.num_warps()
    dt: gl.constexpr = q_rows.dtype
    SL: gl.constexpr = product_layout(W, BN)
    AL: gl.constexpr = product_layout(W, D)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SL)
    qs = gl.allocate_shared_memory(dt, [1, 1, BM, D], q_rows.layout)
    gs = gl.allocate_shared_memory(dt, [1, 1, BM, D], g_rows.layout)
    dus = gl.allocate_shared_memory(dt, [1, 1, BM, D], du_rows.layout)
    ks = gl.allocate_shared_memory(dt, [2, 1, 1, BN, D], k_cols.layout)
    vs = gl.allocate_shared_memory(dt, [2, 1, 1, BN, D], v_cols.layout)
    us = gl.allocate_shared_memory(dt, [2, 1, 1, BN, D], u_cols.layout)
    bars = barriers(3)
    block, blocks, bh, _ = place()
    if CAUSAL:
        # the longest ones first
        block = blocks - 1 - block
    b = bh // heads
    h = bh % heads
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
    mbarrier.expect(bars.index(2), 3 * BM * D * 2)
    tma.async_copy_global_to_shared(q_rows, [b, h, row, 0], bars.index(2), qs)
    tma.async_copy_global_to_shared(g_rows, [b, h, row, 0], bars.index(2), gs)
    tma.async_copy_global_to_shared(du_rows, [b, h, row, 0], bars.index(2), dus)
    _load_step(
        k_cols, v_cols, u_cols, ks, vs, us, bars, b, h, group, start, 0, True, D, BN
    )  # fmt: skip
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
        if MASK == KEY_MASK:
            j = col + gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
            shown = shown_keys(mask, b, h, j, n, mask_b, mask_h, mask_j)
        mbarrier.wait(bars.index(now), (step // 2) & 1)
        s = scores(q, k, zero, False, D, USED)
        da = scores(g, u, zero, False, D, USED)
        da = scores(du, v, da, True, D, USED)
        # all warps are done with the step before; loads begin while products run
        gl.thread_barrier()
        _load_step(
            k_cols, v_cols, u_cols, ks, vs, us, bars, b, h, group, col + BN, step + 1,
            step + 1 < steps, D, BN,
        )  # fmt: skip
        # here, or the compiler puts one at the next step's start, where nothing runs beside it
        gl.thread_barrier()
        s = warpgroup_mma_wait(2 if USED == D else 4, deps=[s])
        p = gl.exp2(s * (scale * LOG2E) - lse[:, None])
        if MASK == SPANS:
            if col < latest:
                j = col + gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
                p = gl.where(j[None, :] >= first[:, None], p, 0.0)
        if CAUSAL:
            if col + BN > row:
                j = col + gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
                p = gl.where(j[None, :] <= i[:, None], p, 0.0)
        # keys that take no part, and zeros beyond the last one: the exponential may be infinite
        if MASK == KEY_MASK:
            p = gl.where(shown[None, :], p, 0.0)
        elif not CAUSAL:
            if col + BN > n:
                j = col + gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
                p = gl.where((j < n)[None, :], p, 0.0)
        da = warpgroup_mma_wait(0, deps=[da])
        ds = p * (da - delta[:, None])
        dq = warpgroup_mma(gl.convert_layout(ds.to(dt), PL), k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
    gl.thread_barrier()
    q.store((dq * scale).to(dt))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(dq_rows, [b, h, row, 0], qs)
    tma.store_wait(0)
