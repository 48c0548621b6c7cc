r"""The whole filter of one head in one program, for sequences whose keys fit on chip.

``P = exp(S − max)`` stays in registers as 16-bit numbers, 64 rows a warpgroup, so that the second
pass needs neither scores nor exponentials again: three matrix products instead of four. U goes
through shared memory to the rows of the other warps. Programs are persistent: while one head is
worked on, the next one's tokens are on their way.
"""

# ruff: noqa: RUF005, SIM102, SIM113 - Gluon compiles a subset of Python

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
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
    pin,
    product_layout,
    scores,
)


@gluon.jit
def _load(tensor, item, heads, group, barrier, room, pred):
    tma.async_copy_global_to_shared(
        tensor, [item // heads, (item % heads) // group, 0, 0], barrier, room, pred=pred
    )


@gluon.jit
def _hide(
    s, n, mask, mask_i, mask_j, START: gl.constexpr, WIDTH: gl.constexpr, EDGE: gl.constexpr,
    CAUSAL: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """A chunk of scores with −inf where a query does not see a key."""
    LAYOUT: gl.constexpr = product_layout(gl.num_warps(), WIDTH)
    j = START + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    if EDGE:
        s = gl.where((j < n)[None, :], s, float("-inf"))
    i = gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    if CAUSAL:
        s = gl.where(i[:, None] >= j[None, :], s, float("-inf"))
    if MASK == KEY_MASK:
        seen = gl.load(mask + j * mask_j, mask=j < n, other=0) != 0
        s = gl.where(seen[None, :], s, float("-inf"))
    if MASK == FULL_MASK:
        # a row of the mask is contiguous
        at = i[:, None] * mask_i + j[None, :]
        there = (i < n)[:, None] & (j < n)[None, :]
        s = gl.where(gl.load(mask + at, mask=there, other=0) != 0, s, float("-inf"))
    return s


@gluon.jit
def _exponentials(s, shift, sc, WIDTH: gl.constexpr):
    LAYOUT: gl.constexpr = product_layout(gl.num_warps(), WIDTH)
    return gl.exp2(s * sc - gl.convert_layout(shift, gl.SliceLayout(1, LAYOUT))[:, None])


@gluon.jit
def _operand(
    p, n, seed, bh, dropped, dt: gl.constexpr, PL: gl.constexpr, START: gl.constexpr,
    WIDTH: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """What of a chunk dropout leaves, in 16 bits and in place for a product."""
    if DROPOUT:
        LAYOUT: gl.constexpr = product_layout(gl.num_warps(), WIDTH)
        i = gl.arange(0, p.shape[0], layout=gl.SliceLayout(1, LAYOUT))[:, None]
        half_j = START // 2 + (gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT)) >> 1)
        p = drop(p, i, half_j[None, :], n, seed, bh, dropped, dt, False, False)
        return gl.convert_layout(p, PL)
    return pin(gl.convert_layout(p.to(dt), PL))


@gluon.jit(**JIT_OPTIONS)
def filter_short(
    q_in, k_in, v_in, u_out, out_out, lse_out, coeffs, mask, seed_in, zero,
    total, heads, group, n, scale, mask_b, mask_i, mask_j, dropout_p,
    N: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, FULL: gl.constexpr, TAIL: gl.constexpr,
    WHOLE: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """``out = c0·V + c1·U + c2·A·U`` for ``total`` heads; FULL chunks of BN keys and a TAIL.

    WHOLE keeps a whole row of scores before the softmax, else it runs chunk by chunk.
    """
    W: gl.constexpr = gl.num_warps()
    dt: gl.constexpr = q_in.dtype
    AL: gl.constexpr = product_layout(W, D)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    RL: gl.constexpr = gl.SliceLayout(1, AL)
    CHUNKS: gl.constexpr = FULL + (1 if TAIL > 0 else 0)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    qs = gl.allocate_shared_memory(dt, [2, 1, 1, N, D], q_in.layout)
    ks = gl.allocate_shared_memory(dt, [2, 1, 1, N, D], k_in.layout)
    vs = gl.allocate_shared_memory(dt, [2, 1, 1, N, D], v_in.layout)
    us = gl.allocate_shared_memory(dt, [1, 1, 1, N, D], u_out.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    fence_async_shared()
    gl.thread_barrier()
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    sc = scale * LOG2E
    keep_p = 1.0
    seed = 0
    dropped = 0
    if DROPOUT:
        keep_p = 1.0 / (1.0 - dropout_p)
        dropped = drop_threshold(dropout_p)
        seed = gl.load(seed_in)
    mbarrier.expect(bars.index(0), 3 * N * D * 2)
    _load(q_in, first, heads, 1, bars.index(0), qs.index(0), True)
    _load(k_in, first, heads, group, bars.index(0), ks.index(0), True)
    _load(v_in, first, heads, group, bars.index(0), vs.index(0), True)
    turn = 0
    for bh in range(first, total, programs):
        now = turn % 2
        phase = (turn // 2) & 1
        following = bh + programs
        after = (turn + 1) % 2
        more = following < total
        h = bh % heads
        # a zero that the compiler does not know: addresses, and counters of dropout, that depend on
        # it cannot be computed before the loop, where they would cost registers and then spills
        unknown = gl.load(zero, volatile=True)
        mbarrier.expect(bars.index(after), 3 * N * D * 2, pred=more)
        _load(k_in, following, heads, group, bars.index(after), ks.index(after), more)
        _load(v_in, following, heads, group, bars.index(after), vs.index(after), more)
        mbarrier.wait(bars.index(now), phase)
        q = qs.index(now)._reinterpret(dt, [N, D], FLAT)
        k = ks.index(now)._reinterpret(dt, [N, D], FLAT)
        v = vs.index(now)._reinterpret(dt, [N, D], FLAT)
        u = us.index(unknown)._reinterpret(dt, [N, D], FLAT)
        seen = mask + (bh // heads).to(gl.int64) * mask_b
        P = ()
        R = ()
        m = gl.full([N], float("-inf"), gl.float32, RL)
        norm = gl.full([N], 0.0, gl.float32, RL)
        acc = gl.full([N, D], 0.0, gl.float32, AL)
        if WHOLE:
            S = ()
            for c in gl.static_range(CHUNKS):
                S = S + (scores(q, k, c * BN, chunk_width(c, FULL, BN, TAIL)),)
            S2 = ()
            for c in gl.static_range(CHUNKS):
                s = warpgroup_mma_wait(CHUNKS - 1 - c, deps=[S[c]])
                s = _hide(
                    s, n, seen, mask_i, mask_j, c * BN, chunk_width(c, FULL, BN, TAIL),
                    c == CHUNKS - 1, CAUSAL, MASK,
                )  # fmt: skip
                m = gl.maximum(m, gl.convert_layout(gl.max(s, 1), RL))
                S2 = S2 + (s,)
            m = m * sc
            if MASK:
                # −inf minus −inf is NaN
                m = gl.where(m == float("-inf"), 0.0, m)
            for c in gl.static_range(CHUNKS):
                p = _exponentials(S2[c], m, sc, chunk_width(c, FULL, BN, TAIL))
                norm = norm + gl.convert_layout(gl.sum(p, 1), RL)
                p = _operand(
                    p, n + unknown, seed, bh, dropped, dt, PL, c * BN,
                    chunk_width(c, FULL, BN, TAIL), DROPOUT,
                )  # fmt: skip
                P = P + (p,)
            for c in gl.static_range(CHUNKS):
                acc = add_product(P[c], v, acc, c * BN, chunk_width(c, FULL, BN, TAIL))
            acc = warpgroup_mma_wait(0, deps=[acc])
        else:
            for c in gl.static_range(CHUNKS):
                s = scores(q, k, c * BN, chunk_width(c, FULL, BN, TAIL))
                s = warpgroup_mma_wait(0, deps=[s])
                s = _hide(
                    s, n, seen, mask_i, mask_j, c * BN, chunk_width(c, FULL, BN, TAIL),
                    c == CHUNKS - 1, CAUSAL, MASK,
                )  # fmt: skip
                top = gl.maximum(m, gl.convert_layout(gl.max(s, 1), RL) * sc)
                shift = top
                if MASK:
                    shift = gl.where(top == float("-inf"), 0.0, top)
                p = _exponentials(s, shift, sc, chunk_width(c, FULL, BN, TAIL))
                r = gl.exp2(m - shift)
                norm = norm * r + gl.convert_layout(gl.sum(p, 1), RL)
                p = _operand(
                    p, n + unknown, seed, bh, dropped, dt, PL, c * BN,
                    chunk_width(c, FULL, BN, TAIL), DROPOUT,
                )  # fmt: skip
                if c > 0:
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    acc = acc * r[:, None]
                acc = add_product(p, v, acc, c * BN, chunk_width(c, FULL, BN, TAIL))
                m = top
                P = P + (p,)
                R = R + (r,)
            acc = warpgroup_mma_wait(0, deps=[acc])
        lse = m + gl.log2(norm)
        il = 1.0 / norm
        if MASK:
            # a row without keys: its map is zero, and stays so in the backward pass
            lse = gl.where(norm == 0.0, float("inf"), lse)
            il = gl.where(norm == 0.0, 0.0, il)
        il = il * keep_p
        u.store((acc * il[:, None]).to(dt))
        fence_async_shared()
        gl.thread_barrier()
        tma.store_wait(0)
        _load(q_in, following, heads, 1, bars.index(after), qs.index(after), more)
        tma.async_copy_shared_to_global(u_out, [bh // heads, h, 0, 0], us.index(0))
        om = gl.arange(0, N, layout=RL)
        gl.store(lse_out + bh.to(gl.int64) * n + om, lse / LOG2E, mask=om < n)
        acc = gl.full([N, D], 0.0, gl.float32, AL)
        for c in gl.static_range(CHUNKS):
            if c > 0:
                if not WHOLE:
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    acc = acc * R[c][:, None]
            acc = add_product(P[c], u, acc, c * BN, chunk_width(c, FULL, BN, TAIL))
        acc = warpgroup_mma_wait(0, deps=[acc])
        c0 = gl.load(coeffs + h * 3)
        c1 = gl.load(coeffs + h * 3 + 1)
        c2 = gl.load(coeffs + h * 3 + 2)
        o = acc * (il * c2)[:, None] + c0 * v.load(AL).to(gl.float32)
        o += c1 * u.load(AL).to(gl.float32)
        q.store(o.to(dt))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out_out, [bh // heads, h, 0, 0], qs.index(now))
        tma.store_wait(1)
        gl.thread_barrier()
        turn += 1
    tma.store_wait(0)
