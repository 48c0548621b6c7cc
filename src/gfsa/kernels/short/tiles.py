"""Layouts and per-tile steps of the short kernels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from gfsa.kernels import problem

LOG2E = gl.constexpr(1.4426950408889634)

# compiled code must not depend on these numbers, nor on the alignment of these tensors
JIT_OPTIONS = {
    "do_not_specialize": ["total", "batch", "heads", "mask_b", "mask_i", "mask_j"],
    "do_not_specialize_on_alignment": ["coeffs", "mask", "seed_in"],
}

KEY_MASK = gl.constexpr(problem.KEY_MASK)
FULL_MASK = gl.constexpr(problem.FULL_MASK)


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
def scores(x, y, START: gl.constexpr, WIDTH: gl.constexpr):
    """Begin ``x·yᵀ`` for WIDTH rows of ``y``."""
    LAYOUT: gl.constexpr = product_layout(gl.num_warps(), WIDTH)
    zero = gl.full([x.shape[0], WIDTH], 0.0, gl.float32, LAYOUT)
    some = y.slice(START, WIDTH).permute((1, 0))
    return warpgroup_mma(x, some, zero, use_acc=False, is_async=True)


@gluon.jit
def more_scores(x, y, total, START: gl.constexpr, WIDTH: gl.constexpr):
    """Begin ``total + x·yᵀ`` for WIDTH rows of ``y``."""
    return warpgroup_mma(x, y.slice(START, WIDTH).permute((1, 0)), total, is_async=True)


@gluon.jit
def add_product(p, x, total, START: gl.constexpr, WIDTH: gl.constexpr):
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
def drop(
    p, row, half_column, n, seed, stream, threshold, dt: gl.constexpr,
    KEYS_FIRST: gl.constexpr, SIGNED: gl.constexpr,
):  # fmt: skip
    """A chunk of the map in 16 bits, what dropout takes away zero, or negative if ``SIGNED``.

    Entries survive that do in ``long/tiles.py``: a function of the entry and the seed alone.

    Args:
        p: in a layout of :func:`product_layout`, rows of keys if ``KEYS_FIRST``, else of queries.
        row: its rows, as a column; half_column: half of its columns, as a row.
        threshold: see :func:`drop_threshold`.
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
def drop_threshold(dropout_p):
    """How many of the numbers 0 … 65535, of which an entry draws one, drop it."""
    exact = dropout_p * 65536.0
    whole = exact.to(gl.int32)
    return whole + (exact - whole.to(gl.float32) > 0.5).to(gl.int32)


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
def own_share(u, v, share):
    """``a·p`` of each row, ``p = ⟨u, v⟩ / ⟨v, v⟩``; 0 where the square of v is 0 or not finite."""
    square = gl.sum(v * v, 1)
    has_direction = (square > 0.0) & (square < float("inf"))
    return gl.where(has_direction, share * gl.sum(u * v, 1) / square, 0.0)


@gluon.jit
def directed(v):
    """``v`` and ``⟨v, v⟩`` of each row; 0 and 1 where that is 0 or not finite."""
    square = gl.sum(v * v, 1)
    has_direction = (square > 0.0) & (square < float("inf"))
    return gl.where(has_direction[:, None], v, 0.0), gl.where(has_direction, square, 1.0)
