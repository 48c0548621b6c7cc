r"""The gradient of one head's filter in one program, for sequences whose keys fit on chip.

The formulas of ``long/backward.py``. A warp owns keys: ``Pᵀ`` stays in registers as 16-bit numbers
from the first product to ``dSᵀ``, so that the whole gradient takes seven matrix products.
"""

# ruff: noqa: RUF005 - Gluon compiles a subset of Python

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

from gfsa.kernels.short.tiles import (
    FULL_MASK,
    JIT_OPTIONS,
    KEY_MASK,
    LOG2E,
    add_product,
    chunk_width,
    drop,
    drop_threshold,
    more_scores,
    pin,
    positive,
    product_layout,
    scores,
    widened,
)


@gluon.jit
def _kept(p, DROPOUT: gl.constexpr):
    """``A`` from a signed ``P``: entries that dropout took away carry a minus sign."""
    if DROPOUT:
        return positive(p)
    return p


@gluon.jit
def _probabilities(
    s, lss, mask, seed, bh, n, sc, mask_i, mask_j, dropped, dt: gl.constexpr, PL: gl.constexpr,
    START: gl.constexpr, WIDTH: gl.constexpr,
    EVEN: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """``Pᵀ`` for a chunk of queries, with a minus sign where dropout takes an entry away."""
    LAYOUT: gl.constexpr = product_layout(gl.num_warps(), WIDTH)
    lse = lss.slice(START, WIDTH).load(gl.SliceLayout(0, LAYOUT))
    x = s * sc - lse[None, :]
    if not EVEN and not MASK:
        # keys beyond the last one are zeros: their row is not used, but it must be finite
        x = gl.minimum(x, 0.0)
    p = gl.exp2(x)
    i = START + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    j = gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    if CAUSAL:
        p = gl.where(i[None, :] >= j[:, None], p, 0.0)
    if MASK == KEY_MASK:
        seen = gl.load(mask + j * mask_j, mask=j < n, other=0) != 0
        p = gl.where(seen[:, None], p, 0.0)
    if MASK == FULL_MASK:
        at = i[None, :] * mask_i + j[:, None]
        there = (i < n)[None, :] & (j < n)[:, None]
        p = gl.where(gl.load(mask + at, mask=there, other=0) != 0, p, 0.0)
    if DROPOUT:
        half_i = START // 2 + (gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT)) >> 1)
        p = drop(p, j[:, None], half_i[None, :], n, seed, bh, dropped, dt, True, True)
        return gl.convert_layout(p, PL)
    return pin(gl.convert_layout(p.to(dt), PL))


@gluon.jit
def _score_gradient(
    a, p, dls, keep_p, dt: gl.constexpr, PL: gl.constexpr,
    START: gl.constexpr, WIDTH: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """``dSᵀ = P∘(dA − δ)`` for a chunk of queries."""
    LAYOUT: gl.constexpr = product_layout(gl.num_warps(), WIDTH)
    delta = dls.slice(START, WIDTH).load(gl.SliceLayout(0, LAYOUT))
    p = widened(gl.convert_layout(p, LAYOUT))
    if DROPOUT:
        a = gl.where(p > 0.0, a * keep_p, 0.0)
        p = gl.abs(p)
    return pin(gl.convert_layout((p * (a - delta[None, :])).to(dt), PL))


@gluon.jit(**JIT_OPTIONS)
def grad_short(
    q_in, k_in, v_in, u_in, out_in, g_in, dq_out, dk_out, dv_out, lse_in, dc_out, coeffs, mask,
    seed_in, batch, heads, group, n, scale, mask_b, mask_i, mask_j, dropout_p,
    N: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, FULL: gl.constexpr, TAIL: gl.constexpr,
    MERGED: gl.constexpr, EVEN: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr,
    DROPOUT: gl.constexpr,
):  # fmt: skip
    """dQ, dK, dV and each row's share of the coefficients' gradients, ``(H, 3, B, N)``.

    MERGED runs a product of one chunk while the next one's scores are made; it takes more
    registers. EVEN says that there are exactly N tokens.
    """
    W: gl.constexpr = gl.num_warps()
    dt: gl.constexpr = q_in.dtype
    AL: gl.constexpr = product_layout(W, D)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    RL: gl.constexpr = gl.SliceLayout(1, AL)
    CHUNKS: gl.constexpr = FULL + (1 if TAIL > 0 else 0)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    qs = gl.allocate_shared_memory(dt, [1, 1, N, D], q_in.layout)
    ks = gl.allocate_shared_memory(dt, [1, 1, N, D], k_in.layout)
    os = gl.allocate_shared_memory(dt, [1, 1, N, D], k_in.layout)
    # four tensors, whose memory dSᵀ takes at the end
    big = gl.allocate_shared_memory(dt, [4, 1, 1, N, D], k_in.layout)
    dls = gl.allocate_shared_memory(gl.float32, [N], VECTOR)
    lss = gl.allocate_shared_memory(gl.float32, [N], VECTOR)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    fence_async_shared()
    gl.thread_barrier()
    q = qs._reinterpret(dt, [N, D], FLAT)
    k = ks._reinterpret(dt, [N, D], FLAT)
    o = os._reinterpret(dt, [N, D], FLAT)
    g = big.index(0)._reinterpret(dt, [N, D], FLAT)
    u = big.index(1)._reinterpret(dt, [N, D], FLAT)
    v = big.index(2)._reinterpret(dt, [N, D], FLAT)
    du = big.index(3)._reinterpret(dt, [N, D], FLAT)
    ds = big._reinterpret(dt, [N, 4 * D], FLAT)
    bh = gl.program_id(0)
    b = bh // heads
    h = bh % heads
    hk = h // group
    mbarrier.expect(bars.index(0), 2 * N * D * 2)
    tma.async_copy_global_to_shared(k_in, [b, hk, 0, 0], bars.index(0), ks)
    tma.async_copy_global_to_shared(q_in, [b, h, 0, 0], bars.index(0), qs)
    mbarrier.expect(bars.index(1), 4 * N * D * 2)
    tma.async_copy_global_to_shared(g_in, [b, h, 0, 0], bars.index(1), big.index(0))
    tma.async_copy_global_to_shared(v_in, [b, hk, 0, 0], bars.index(1), big.index(2))
    tma.async_copy_global_to_shared(out_in, [b, h, 0, 0], bars.index(1), big.index(3))
    tma.async_copy_global_to_shared(u_in, [b, h, 0, 0], bars.index(1), big.index(1))
    rows = gl.arange(0, N, layout=RL)
    sc = scale * LOG2E
    c0 = gl.load(coeffs + h * 3)
    c1 = gl.load(coeffs + h * 3 + 1)
    c2 = gl.load(coeffs + h * 3 + 2)
    keep_p = 1.0
    seed = 0
    dropped = 0
    if DROPOUT:
        keep_p = 1.0 / (1.0 - dropout_p)
        dropped = drop_threshold(dropout_p)
        seed = gl.load(seed_in)
    seen = mask + b.to(gl.int64) * mask_b
    dc = dc_out + (h * 3 * batch + b).to(gl.int64) * N + rows
    # queries beyond the last one see nothing
    lse = gl.load(lse_in + bh.to(gl.int64) * n + rows, mask=rows < n, other=float("inf"))
    lss.store(lse * LOG2E)
    gl.thread_barrier()
    if not MERGED:
        mbarrier.wait(bars.index(0), 0)
    P = ()
    if not MERGED:
        for c in gl.static_range(CHUNKS):
            s = scores(k, q, c * BN, chunk_width(c, FULL, BN, TAIL))
            s = warpgroup_mma_wait(0, deps=[s])
            p = _probabilities(
                s, lss, seen, seed, bh, n, sc, mask_i, mask_j, dropped, dt, PL, c * BN,
                chunk_width(c, FULL, BN, TAIL), EVEN, CAUSAL, MASK, DROPOUT,
            )  # fmt: skip
            P = P + (p,)
    mbarrier.wait(bars.index(1), 0)
    # the rows' sums while little else is alive; barriers keep their loads apart
    gv = gl.sum(g.load(AL).to(gl.float32) * v.load(AL).to(gl.float32), 1)
    gl.store(dc, gv)
    gl.thread_barrier()
    delta = gl.sum(g.load(AL).to(gl.float32) * du.load(AL).to(gl.float32), 1) - c0 * gv
    gl.thread_barrier()
    gl.store(dc + batch * N, gl.sum(g.load(AL).to(gl.float32) * u.load(AL).to(gl.float32), 1))
    gl.thread_barrier()
    # z = Aᵀ·g
    z = gl.full([N, D], 0.0, gl.float32, AL)
    if MERGED:
        mbarrier.wait(bars.index(0), 0)
        for c in gl.static_range(CHUNKS):
            s = scores(k, q, c * BN, chunk_width(c, FULL, BN, TAIL))
            if c > 0:
                s, z = warpgroup_mma_wait(0, deps=[s, z])
            else:
                s = warpgroup_mma_wait(0, deps=[s])
            p = _probabilities(
                s, lss, seen, seed, bh, n, sc, mask_i, mask_j, dropped, dt, PL, c * BN,
                chunk_width(c, FULL, BN, TAIL), EVEN, CAUSAL, MASK, DROPOUT,
            )  # fmt: skip
            z = add_product(_kept(p, DROPOUT), g, z, c * BN, chunk_width(c, FULL, BN, TAIL))
            P = P + (p,)
    else:
        for c in gl.static_range(CHUNKS):
            z = add_product(_kept(P[c], DROPOUT), g, z, c * BN, chunk_width(c, FULL, BN, TAIL))
    z = warpgroup_mma_wait(0, deps=[z])
    if DROPOUT:
        z = z * keep_p
    uf = u.load(AL).to(gl.float32)
    zu = gl.sum(z * uf, 1)
    gl.store(dc + 2 * batch * N, zu)
    u.store((c2 * uf).to(dt))
    dls.store(delta + c2 * zu)
    gl.thread_barrier()
    du.store((c1 * g.load(AL).to(gl.float32) + c2 * z).to(dt))
    fence_async_shared()
    gl.thread_barrier()
    # dV = c0·g + Aᵀ·dU
    dv = gl.full([N, D], 0.0, gl.float32, AL)
    for c in gl.static_range(CHUNKS):
        dv = add_product(_kept(P[c], DROPOUT), du, dv, c * BN, chunk_width(c, FULL, BN, TAIL))
        if DROPOUT:
            # an asynchronous product holds its operand, a copy of P, in registers until done
            dv = warpgroup_mma_wait(0, deps=[dv])
    dv = warpgroup_mma_wait(0, deps=[dv])
    o.store((dv * keep_p + c0 * g.load(AL).to(gl.float32)).to(dt))
    # dSᵀ takes the place of Pᵀ
    DS = ()
    dk = gl.full([N, D], 0.0, gl.float32, AL)
    for c in gl.static_range(CHUNKS):
        a = scores(u, g, c * BN, chunk_width(c, FULL, BN, TAIL))
        a = more_scores(v, du, a, c * BN, chunk_width(c, FULL, BN, TAIL))
        if MERGED and c > 0:
            a, dk = warpgroup_mma_wait(0, deps=[a, dk])
        else:
            a = warpgroup_mma_wait(0, deps=[a])
        d = _score_gradient(
            a, P[c], dls, keep_p, dt, PL, c * BN, chunk_width(c, FULL, BN, TAIL), DROPOUT
        )
        if MERGED:
            dk = add_product(d, q, dk, c * BN, chunk_width(c, FULL, BN, TAIL))
        DS = DS + (d,)
    if MERGED:
        dk = warpgroup_mma_wait(0, deps=[dk])
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(dv_out, [b, h, 0, 0], os)
    for c in gl.static_range(CHUNKS):
        ds.slice(c * BN, chunk_width(c, FULL, BN, TAIL), dim=1).store(DS[c])
    if not MERGED:
        for c in gl.static_range(CHUNKS):
            dk = add_product(DS[c], q, dk, c * BN, chunk_width(c, FULL, BN, TAIL))
        dk = warpgroup_mma_wait(0, deps=[dk])
    fence_async_shared()
    gl.thread_barrier()
    dq = gl.full([N, D], 0.0, gl.float32, AL)
    dst = ds.slice(0, N, dim=1).permute((1, 0))
    dq = warpgroup_mma(dst, k, dq, use_acc=False, is_async=True)
    q.store((dk * scale).to(dt))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(dk_out, [b, h, 0, 0], qs)
    dq = warpgroup_mma_wait(0, deps=[dq])
    tma.store_wait(1)
    gl.thread_barrier()
    o.store((dq * scale).to(dt))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(dq_out, [b, h, 0, 0], os)
    tma.store_wait(0)
