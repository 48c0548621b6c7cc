"""``dK = dSᵀ·Q·scale`` and ``dV = c0·g + Aᵀ·dU``, a block of keys a program; dQ as well if asked.

With dQ, scores, dA and dS are computed once for the three: six products a tile instead of nine. dK
and dV stay in registers; the part ``dS·K`` of dQ is added to a sum in float32 in memory. Programs
add in any order, so the last bits of dQ differ from run to run.
"""

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

from gfsa.kernels.hopper.sums import add, query_layout
from gfsa.kernels.hopper.tiles import (
    FLAT,
    JIT_OPTIONS,
    KEY_MASK,
    LOG2E,
    barriers,
    hide_queries,
    place,
    queries_of_keys,
    scores,
    shown_keys,
    tile_of,
    vector_of,
)
from gfsa.kernels.short.tiles import product_layout


@gluon.jit
def _load_step(
    q_cols, g_cols, du_cols, lse_cols, delta_cols, qs, gs, dus, lss, dls, bars, b, h, col, step,
    pred, D: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Begin to load what step number ``step`` of ``grad_keys`` takes."""
    now = step % 2
    bar = bars.index(now)
    mbarrier.expect(bar, 3 * BN * D * 2 + 2 * BN * 4, pred=pred)
    tma.async_copy_global_to_shared(q_cols, [b, h, col, 0], bar, qs.index(now), pred=pred)
    tma.async_copy_global_to_shared(lse_cols, [b, h, 0, col], bar, lss.index(now), pred=pred)
    tma.async_copy_global_to_shared(g_cols, [b, h, col, 0], bar, gs.index(now), pred=pred)
    tma.async_copy_global_to_shared(du_cols, [b, h, col, 0], bar, dus.index(now), pred=pred)
    tma.async_copy_global_to_shared(delta_cols, [b, h, 0, col], bar, dls.index(now), pred=pred)


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
    W: gl.constexpr = gl.num_warps()
    dt: gl.constexpr = q_cols.dtype
    SL: gl.constexpr = product_layout(W, BN)
    AL: gl.constexpr = product_layout(W, D)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    ks = gl.allocate_shared_memory(dt, [1, 1, BM, D], k_rows.layout)
    vs = gl.allocate_shared_memory(dt, [1, 1, BM, D], v_rows.layout)
    us = gl.allocate_shared_memory(dt, [1, 1, BM, D], u_rows.layout)
    qs = gl.allocate_shared_memory(dt, [2, 1, 1, BN, D], q_cols.layout)
    gs = gl.allocate_shared_memory(dt, [2, 1, 1, BN, D], g_cols.layout)
    dus = gl.allocate_shared_memory(dt, [2, 1, 1, BN, D], du_cols.layout)
    lss = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 1, BN], lse_cols.layout)
    dls = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 1, BN], delta_cols.layout)
    if WITH_QUERIES:
        QL: gl.constexpr = query_layout(W, D)
        dss = gl.allocate_shared_memory(dt, [BM, BN], FLAT)
        zero_q = gl.full([BN, D], 0.0, gl.float32, QL)
    bars = barriers(3)
    block, _, bh, _ = place()
    b = bh // heads
    h = bh % heads
    row = block * BM
    sums += bh.to(gl.int64) * gl.cdiv(n, BN) * (BN * D)
    start, steps, earliest, mask = queries_of_keys(mask, b, row, n, mask_b, BM, BN, CAUSAL, MASK)
    mbarrier.expect(bars.index(2), 3 * BM * D * 2)
    tma.async_copy_global_to_shared(k_rows, [b, h // group, row, 0], bars.index(2), ks)
    tma.async_copy_global_to_shared(u_rows, [b, h, row, 0], bars.index(2), us)
    tma.async_copy_global_to_shared(v_rows, [b, h // group, row, 0], bars.index(2), vs)
    _load_step(
        q_cols, g_cols, du_cols, lse_cols, delta_cols, qs, gs, dus, lss, dls, bars, b, h, start, 0,
        True, D, BN,
    )  # fmt: skip
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
        # all warps are done with the step before; loads begin while products run
        gl.thread_barrier()
        _load_step(
            q_cols, g_cols, du_cols, lse_cols, delta_cols, qs, gs, dus, lss, dls, bars, b, h,
            col + BN, step + 1, step + 1 < steps, D, BN,
        )  # fmt: skip
        # here, or the compiler puts one at the next step's start, where nothing runs beside it
        gl.thread_barrier()
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
    mbarrier.expect(bars.index(2), BM * D * 2)
    tma.async_copy_global_to_shared(g_rows, [b, h, row, 0], bars.index(2), us)
    k.store((dk * scale).to(dt))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(dk_rows, [b, h, row, 0], ks)
    c0 = gl.load(coeffs + h * 3)
    mbarrier.wait(bars.index(2), 1)
    v.store((dv + c0 * u.load(AL).to(gl.float32)).to(dt))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(dv_rows, [b, h, row, 0], vs)
    tma.store_wait(0)
