r"""The whole filter of one head in one program, and its gradient, for keys that fit on chip.

**Forward.** ``P = exp(S − max)`` stays in registers as 16-bit numbers, 64 rows a warpgroup, so that
the second pass needs neither scores nor exponentials again: three matrix products instead of four.
U goes through shared memory to the rows of the other warps. Programs are persistent: while one head
is worked on, the next one's tokens are on their way.

**Gradient**, with the formulas of ``two_pass.py``. A warp owns keys: ``Pᵀ`` stays in registers as
16-bit numbers from the first product to ``dSᵀ``, so that the whole gradient takes seven matrix
products.

Names in capitals are known when a kernel is compiled, here and in all files of kernels.
"""

# ruff: noqa: RUF005, SIM102, SIM113 - Gluon compiles a subset of Python

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

LOG2E = gl.constexpr(1.4426950408889634)

# compiled code must not depend on these numbers, nor on the alignment of these tensors
JIT_OPTIONS = {
    "do_not_specialize": ["total", "batch", "heads", "mask_b", "mask_i", "mask_j"],
    "do_not_specialize_on_alignment": ["coeffs", "mask", "seed_in"],
}

KEY_MASK = gl.constexpr(launching.KEY_MASK)
FULL_MASK = gl.constexpr(launching.FULL_MASK)


# tiles and vectors as products and threads read them, whatever the copy engine's shape
FLAT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def product_layout(warps, columns):
    """The layout of a matrix product's result, 16 rows a warp."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def chunk_width(chunk, full_chunks, width, tail):
    """Columns of chunk number ``chunk``: the last one may be narrower."""
    return width if chunk < full_chunks else tail


@gluon.jit
def tile_of(room, ROWS, D):
    """Shared memory of one tile as a matrix."""
    return room._reinterpret(room.dtype, [ROWS, D], FLAT)


@gluon.constexpr_function
def _shape_of(tensor, count):
    return [count, *tensor.block_shape] if count else tensor.block_shape


@gluon.jit
def room_of(tensor, COUNT=0):
    """Shared memory for a tile of a tensor, or for a ring of COUNT tiles."""
    SHAPE: gl.constexpr = _shape_of(tensor, COUNT)
    return gl.allocate_shared_memory(tensor.dtype, SHAPE, tensor.layout)


@gluon.jit
def coefficients(coeffs, h, POWERS, DEGREE):
    """c0, c1 and, with degree 2, c2."""
    at = coeffs + h * POWERS
    return gl.load(at), gl.load(at + 1), gl.load(at + DEGREE)


@gluon.jit
def barriers(COUNT):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for x in gl.static_range(COUNT):
        mbarrier.init(bars.index(x), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return bars


@gluon.jit
def scores(x, y, START, WIDTH):
    """Begin ``x·yᵀ`` for WIDTH rows of ``y``."""
    LAYOUT: gl.constexpr = product_layout(gl.num_warps(), WIDTH)
    zero = gl.full([x.shape[0], WIDTH], 0.0, gl.float32, LAYOUT)
    some = y.slice(START, WIDTH).permute((1, 0))
    return warpgroup_mma(x, some, zero, use_acc=False, is_async=True)


@gluon.jit
def more_scores(x, y, total, START, WIDTH):
    """Begin ``total + x·yᵀ`` for WIDTH rows of ``y``."""
    return warpgroup_mma(x, y.slice(START, WIDTH).permute((1, 0)), total, is_async=True)


@gluon.jit
def add_product(p, x, total, START, WIDTH):
    """Begin ``total + p·x`` for WIDTH rows of ``x``; the first chunk starts from zero."""
    return warpgroup_mma(p, x.slice(START, WIDTH), total, use_acc=START > 0, is_async=True)


@gluon.jit
def pin(x):
    """Force the compiler to compute ``x``, two 16-bit numbers a register, at this point.

    Otherwise it moves the exponential to its first use, which keeps the scores alive in float32
    and spills.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
    )


@gluon.constexpr_function
def _dropping(dt, keys_first, signed):
    """Assembly that drops some of a thread's four entries, and rounds them to 16 bits.

    They are two neighbours in row r, and those below them in row r + 8. Four entries share a draw,
    two by two, so the thread four lanes on, which has row r + 1, needs the same two draws: each of
    the threads makes one of them, and they exchange what the other one needs.
    """
    # Philox2x32, seven rounds
    philox = (
        7
        * """
        mul.lo.u32 product, low, 0xD256D193;
        mul.hi.u32 low, low, 0xD256D193;
        lop3.b32 low, low, high, key, 0x96;
        mov.b32 high, product;
        add.u32 key, key, 0x9E3779B9;"""
    )
    if keys_first:
        # a draw has a word for each query and half of it for each key; here it is the reverse
        philox += """
        prmt.b32 product, low, high, 0x5410;
        prmt.b32 high, low, high, 0x7632;
        mov.b32 low, product;"""
    entries = ""
    for place in range(4):
        value, word = f"${2 + place}", ("upper", "lower")[place // 2]
        half, bits = (("and.b32", "0xFFFF"), ("shr.u32", "16"))[place % 2]
        entries += f"""
        {half} number, {word}, {bits};
        setp.ge.u32 kept, number, $18;
        {f"neg.f32 other, {value}" if signed else "mov.f32 other, 0f00000000"};
        selp.f32 e{place}, {value}, other, kept;"""
    number = "bf16" if dt == gl.bfloat16 else "f16"
    return f"""
    {{
        .reg .b32 low, high, key, product, sent, own, received, upper, lower, number;
        .reg .f32 e0, e1, e2, e3, other;
        .reg .pred odd, kept;
        mov.b32 low, $6;
        mov.b32 key, $10;
        mov.b32 high, $14;{philox}
        and.b32 number, $22, 1;
        setp.ne.u32 odd, number, 0;
        selp.b32 sent, low, high, odd;
        selp.b32 own, high, low, odd;
        shfl.sync.bfly.b32 received, sent, 4, 0x1f, 0xffffffff;
        selp.b32 upper, received, own, odd;
        selp.b32 lower, own, received, odd;{entries}
        cvt.rn.{number}x2.f32 $0, e1, e0;
        cvt.rn.{number}x2.f32 $1, e3, e2;
    }}
    """


@gluon.jit
def drop(p, row, half_column, n, seed, stream, threshold, dt, KEYS_FIRST, SIGNED):
    """A chunk of the map in 16 bits, what dropout takes away zero, or negative if ``SIGNED``.

    Entries survive that do in ``two_pass.py``: a function of the entry and the seed alone.

    Args:
        p: in a layout of :func:`product_layout`, rows of keys if ``KEYS_FIRST``, else of queries.
        row: its rows, as a column; half_column: half of its columns, as a row.
        threshold: see :func:`_dropout`.
    """
    # of the draw that this thread makes: the upper one if its rows are even, else the lower one
    half_row = ((row & ~8) | ((row & 1) << 3)) >> 1
    if KEYS_FIRST:
        counter = half_column * ((n + 1) // 2) + half_row
    else:
        counter = half_row * ((n + 1) // 2) + half_column
    return gl.inline_asm_elementwise(
        _dropping(dt, KEYS_FIRST, SIGNED),
        "=r,=r,f,f,f,f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [p, counter, seed.to(gl.int32), stream, threshold, row],
        dtype=dt.value, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _dropout(dropout_p, seed_in, DROPOUT):
    """What entries are multiplied by that stay, how many of 65,536 numbers drop one, and the seed.

    An entry draws one of the numbers 0 … 65535.
    """
    keep_p = 1.0
    dropped = 0
    seed = 0
    if DROPOUT:
        keep_p = 1.0 / (1.0 - dropout_p)
        exact = dropout_p * 65536.0
        whole = exact.to(gl.int32)
        dropped = whole + (exact - whole.to(gl.float32) > 0.5).to(gl.int32)
        seed = gl.load(seed_in)
    return keep_p, dropped, seed


@gluon.constexpr_function
def _clamping(dt):
    number = "bf16" if dt == gl.bfloat16 else "f16"
    return f"{{ .reg .b32 zero; mov.b32 zero, 0; max.{number}x2 $0, $1, zero; }}"


@gluon.jit
def positive(x):
    """``x``, negative numbers replaced by zero, two in a register at a time."""
    return gl.inline_asm_elementwise(
        _clamping(x.dtype), "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
    )


@gluon.constexpr_function
def _widening(dt):
    if dt == gl.bfloat16:
        return "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;"
    return "{ .reg .f16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"


@gluon.jit
def widened(x):
    """``x`` as float32, read from registers of two numbers each.

    The compiler would take such registers apart where they are written, and keep the halves, a
    register each, until they are used.
    """
    return gl.inline_asm_elementwise(
        _widening(x.dtype), "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def directed(v):
    """``v`` and ``⟨v, v⟩`` of each row; 0 and 1 where that is 0 or not finite."""
    square = gl.sum(v * v, 1)
    has_direction = (square > 0.0) & (square < float("inf"))
    return gl.where(has_direction[:, None], v, 0.0), gl.where(has_direction, square, 1.0)


@gluon.jit
def _load(tensor, item, heads, group, barrier, room, pred):
    tma.async_copy_global_to_shared(
        tensor, [item // heads, (item % heads) // group, 0, 0], barrier, room, pred=pred
    )


@gluon.jit
def _hide(s, n, mask, mask_i, mask_j, START, WIDTH, EDGE, CAUSAL, MASK):
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
def _exponentials(s, shift, sc, WIDTH):
    LAYOUT: gl.constexpr = product_layout(gl.num_warps(), WIDTH)
    return gl.exp2(s * sc - gl.convert_layout(shift, gl.SliceLayout(1, LAYOUT))[:, None])


@gluon.jit
def _operand(p, n, seed, bh, dropped, dt, PL, START, WIDTH, DROPOUT):
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
    WHOLE: gl.constexpr, KEEPS: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr,
    DROPOUT: gl.constexpr,
):  # fmt: skip
    """``out = c0·V + c1·U + c2·A·U`` for ``total`` heads; FULL chunks of BN keys and a TAIL.

    WHOLE keeps a whole row of scores before the softmax, else it runs chunk by chunk. KEEPS writes
    U for the gradient.
    """
    dt: gl.constexpr = q_in.dtype
    AL: gl.constexpr = product_layout(gl.num_warps(), D)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    RL: gl.constexpr = gl.SliceLayout(1, AL)
    CHUNKS: gl.constexpr = FULL + (1 if TAIL > 0 else 0)
    qs, ks, vs, us = room_of(q_in, 2), room_of(k_in, 2), room_of(v_in, 2), room_of(u_out, 1)
    bars = barriers(2)
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    sc = scale * LOG2E
    keep_p, dropped, seed = _dropout(dropout_p, seed_in, DROPOUT)
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
        q = tile_of(qs.index(now), N, D)
        k = tile_of(ks.index(now), N, D)
        v = tile_of(vs.index(now), N, D)
        u = tile_of(us.index(unknown), N, D)
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
        if KEEPS:
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
        c0, c1, c2 = coefficients(coeffs, h, 3, 2)
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


@gluon.jit
def _kept(p, DROPOUT):
    """``A`` from a signed ``P``: entries that dropout took away carry a minus sign."""
    if DROPOUT:
        return positive(p)
    return p


@gluon.jit
def _probabilities(
    s, lss, mask, seed, bh, n, sc, mask_i, mask_j, dropped, dt, PL, START, WIDTH, EVEN, CAUSAL,
    MASK, DROPOUT,
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
def _score_gradient(a, p, dls, keep_p, dt, PL, START, WIDTH, DROPOUT):
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
    dt: gl.constexpr = q_in.dtype
    AL: gl.constexpr = product_layout(gl.num_warps(), D)
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    RL: gl.constexpr = gl.SliceLayout(1, AL)
    CHUNKS: gl.constexpr = FULL + (1 if TAIL > 0 else 0)
    qs, ks, os = room_of(q_in), room_of(k_in), room_of(k_in)
    # four tensors, whose memory dSᵀ takes at the end
    big = room_of(k_in, 4)
    dls = gl.allocate_shared_memory(gl.float32, [N], VECTOR)
    lss = gl.allocate_shared_memory(gl.float32, [N], VECTOR)
    bars = barriers(2)
    q = tile_of(qs, N, D)
    k = tile_of(ks, N, D)
    o = tile_of(os, N, D)
    g = tile_of(big.index(0), N, D)
    u = tile_of(big.index(1), N, D)
    v = tile_of(big.index(2), N, D)
    du = tile_of(big.index(3), N, D)
    ds = tile_of(big, N, 4 * D)
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
    c0, c1, c2 = coefficients(coeffs, h, 3, 2)
    keep_p, dropped, seed = _dropout(dropout_p, seed_in, DROPOUT)
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
