"""``z = Aᵀ·g``, and what follows from it row by row: dU, δ and the coefficients' gradients."""

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
    q_cols, g_cols, lse_cols, qs, gs, lss, bars, b, h, col, step, pred,
    D: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Begin to load what step number ``step`` of ``grad_first_pass`` takes."""
    now = step % 2
    bar = bars.index(now)
    mbarrier.expect(bar, 2 * BN * D * 2 + BN * 4, pred=pred)
    tma.async_copy_global_to_shared(q_cols, [b, h, col, 0], bar, qs.index(now), pred=pred)
    tma.async_copy_global_to_shared(lse_cols, [b, h, 0, col], bar, lss.index(now), pred=pred)
    tma.async_copy_global_to_shared(g_cols, [b, h, col, 0], bar, gs.index(step % 3), pred=pred)


@gluon.jit(**JIT_OPTIONS)
def grad_first_pass(
    q_cols, g_cols, lse_cols, k_rows, g_rows, v_rows, u_rows, out_rows, du_rows,
    delta_out, dc_out, coeffs, mask,
    heads, group, n, scale, mask_b, mask_h, mask_j,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr,
    USED: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """``z = Aᵀ·g`` for BM keys, then dU, δ and the coefficients' gradients of these rows."""
    W: gl.constexpr = gl.num_warps()
    dt: gl.constexpr = q_cols.dtype
    SL: gl.constexpr = product_layout(W, BN)
    AL: gl.constexpr = product_layout(W, D)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    gl.static_assert(BM == BN or BM == 2 * BN)
    ks = gl.allocate_shared_memory(dt, [1, 1, BM, D], k_rows.layout)
    qs = gl.allocate_shared_memory(dt, [2, 1, 1, BN, D], q_cols.layout)
    # three are in use at a time
    gs = gl.allocate_shared_memory(dt, [3 if BM == BN else 4, 1, 1, BN, D], g_cols.layout)
    lss = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 1, BN], lse_cols.layout)
    bars = barriers(3)
    block, blocks, bh, total = place()
    b = bh // heads
    h = bh % heads
    row = block * BM
    start, steps, earliest, mask = queries_of_keys(mask, b, row, n, mask_b, BM, BN, CAUSAL, MASK)
    mbarrier.expect(bars.index(2), BM * D * 2)
    tma.async_copy_global_to_shared(k_rows, [b, h // group, row, 0], bars.index(2), ks)
    _load_step(q_cols, g_cols, lse_cols, qs, gs, lss, bars, b, h, start, 0, True, D, BN)
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
        # all warps are done with the step before; loads begin while products run
        gl.thread_barrier()
        _load_step(
            q_cols, g_cols, lse_cols, qs, gs, lss, bars, b, h, col + BN, step + 1,
            step + 1 < steps, D, BN,
        )  # fmt: skip
        # here, or the compiler puts one at the next step's start, where nothing runs beside it
        gl.thread_barrier()
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
    mbarrier.expect(bars.index(2), 4 * BM * D * 2)
    tma.async_copy_global_to_shared(g_rows, [b, h, row, 0], bars.index(2), ks)
    tma.async_copy_global_to_shared(u_rows, [b, h, row, 0], bars.index(2), us)
    tma.async_copy_global_to_shared(v_rows, [b, h // group, row, 0], bars.index(2), vs)
    tma.async_copy_global_to_shared(out_rows, [b, h, row, 0], bars.index(2), outs)
    c0 = gl.load(coeffs + h * 3)
    c1 = gl.load(coeffs + h * 3 + 1)
    c2 = gl.load(coeffs + h * 3 + 2)
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
    k.store((c1 * g + c2 * z).to(dt))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(du_rows, [b, h, row, 0], ks)
    gl.store(delta_out + bh.to(gl.int64) * n + rows, go - c0 * gv + c2 * zu, mask=rows < n)
    # (H, 3, B·blocks): what is added up is contiguous
    parts = total // heads * blocks
    dc = dc_out + h * 3 * parts + b * blocks + block
    gl.store(dc, gl.sum(gv, 0))
    gl.store(dc + parts, gl.sum(gu, 0))
    gl.store(dc + 2 * parts, gl.sum(zu, 0))
    tma.store_wait(0)
