"""dQ, dK and dV of wide heads under a causal mask from one kernel: six products a tile, not nine.

A program owns BM keys and takes the queries that see them, BN at a time. Scores, dA and dS are
computed once for the three: dK and dV stay in registers, and the part of ``dQ = dS·K·scale`` is
added to a sum in float32 in memory. Programs add in any order, so the last bits of dQ differ from
run to run, as those of cuDNN's attention gradient do.
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

from gfsa.operators.fused.hopper.keys import load_step
from gfsa.operators.fused.hopper.sums import add, get, query_layout
from gfsa.operators.fused.hopper.tiles import (
    FLAT,
    LOG2E,
    barriers,
    place_of_program,
    scores,
    tile_of,
    vector_of,
)
from gfsa.operators.fused.short.tiles import product_layout


@gluon.jit(do_not_specialize=["heads"], do_not_specialize_on_alignment=["coeffs"])
def grad_tokens(
    q_cols, g_cols, du_cols, lse_cols, delta_cols, k_rows, v_rows, u_rows, g_rows, dk_rows,
    dv_rows, sums, coeffs,
    heads, group, n, scale,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    """dK and dV for BM keys of one query head, and their part of dQ.

    Args:
        sums: dQ, zero before the launch.
        SPAN: heads that take turns with their blocks.
    """
    W: gl.constexpr = gl.num_warps()
    dt: gl.constexpr = q_cols.dtype
    SL: gl.constexpr = product_layout(W, BN)
    AL: gl.constexpr = product_layout(W, D)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    QL: gl.constexpr = query_layout(W, D)
    ks = gl.allocate_shared_memory(dt, [1, 1, BM, D], k_rows.layout)
    vs = gl.allocate_shared_memory(dt, [1, 1, BM, D], v_rows.layout)
    us = gl.allocate_shared_memory(dt, [1, 1, BM, D], u_rows.layout)
    qs = gl.allocate_shared_memory(dt, [2, 1, 1, BN, D], q_cols.layout)
    gs = gl.allocate_shared_memory(dt, [2, 1, 1, BN, D], g_cols.layout)
    dus = gl.allocate_shared_memory(dt, [2, 1, 1, BN, D], du_cols.layout)
    lss = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 1, BN], lse_cols.layout)
    dls = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 1, BN], delta_cols.layout)
    dss = gl.allocate_shared_memory(dt, [BM, BN], FLAT)
    bars = barriers(3)
    bh, block = place_of_program(SPAN)
    b = bh // heads
    h = bh % heads
    row = block * BM
    steps = gl.cdiv(n - row, BN)
    sums += bh.to(gl.int64) * gl.cdiv(n, BN) * (BN * D)
    mbarrier.expect(bars.index(2), 3 * BM * D * 2)
    tma.async_copy_global_to_shared(k_rows, [b, h // group, row, 0], bars.index(2), ks)
    tma.async_copy_global_to_shared(u_rows, [b, h, row, 0], bars.index(2), us)
    tma.async_copy_global_to_shared(v_rows, [b, h // group, row, 0], bars.index(2), vs)
    load_step(
        q_cols, g_cols, du_cols, lse_cols, delta_cols, qs, gs, dus, lss, dls, bars, b, h, row, 0,
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
    zero_q = gl.full([BN, D], 0.0, gl.float32, QL)
    for step in range(steps):
        now = step % 2
        col = row + step * BN
        q = tile_of(qs.index(now), BN, D)
        g = tile_of(gs.index(now), BN, D)
        du = tile_of(dus.index(now), BN, D)
        mbarrier.wait(bars.index(now), (step // 2) & 1)
        s = scores(k, q, zero, False, D, D)
        da = scores(u, g, zero, False, D, D)
        da = scores(v, du, da, True, D, D)
        # all warps are done with the step before; loads begin while products run
        gl.thread_barrier()
        load_step(
            q_cols, g_cols, du_cols, lse_cols, delta_cols, qs, gs, dus, lss, dls, bars, b, h,
            col + BN, step + 1, step + 1 < steps, D, BN,
        )  # fmt: skip
        # here, or the compiler puts one at the next step's start, where nothing runs beside it
        gl.thread_barrier()
        s = warpgroup_mma_wait(2, deps=[s])
        lse = vector_of(lss.index(now), BN, SL) * LOG2E
        p = gl.exp2(s * (scale * LOG2E) - lse[None, :])
        if col < row + BM:
            i = col + gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
            j = row + gl.arange(0, BM, layout=gl.SliceLayout(1, SL))
            p = gl.where(j[:, None] <= i[None, :], p, 0.0)
        dv = warpgroup_mma(gl.convert_layout(p.to(dt), PL), du, dv, is_async=True)
        da = warpgroup_mma_wait(1, deps=[da])
        ds = (p * (da - vector_of(dls.index(now), BN, SL)[None, :])).to(dt)
        dss.store(ds)
        fence_async_shared()
        gl.thread_barrier()
        dq = warpgroup_mma(dss.permute((1, 0)), k, zero_q, use_acc=False, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, PL), q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=[dv, dq])
        add(dq, sums + col // BN * (BN * D), BN, D, QL)
        dk = warpgroup_mma_wait(0, deps=[dk])
    gl.thread_barrier()
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


@gluon.jit(do_not_specialize=["heads"])
def finish_queries(dq_cols, sums, heads, scale, D: gl.constexpr, BN: gl.constexpr):
    """``dQ = sum·scale`` in 16 bits, for BN queries of one head."""
    LAYOUT: gl.constexpr = query_layout(gl.num_warps(), D)
    tile = gl.program_id(0)
    bh = gl.program_id(1)
    at = sums + (bh.to(gl.int64) * gl.num_programs(0) + tile) * (BN * D)
    dq = get(at, BN, D, LAYOUT) * scale
    stage = gl.allocate_shared_memory(dq_cols.dtype, [1, 1, BN, D], dq_cols.layout)
    tile_of(stage, BN, D).store(dq.to(dq_cols.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(dq_cols, [bh // heads, bh % heads, tile * BN, 0], stage)
    tma.store_wait(0)
