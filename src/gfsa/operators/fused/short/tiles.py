"""Layouts and per-tile steps of the short kernels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from gfsa.operators.fused import problem

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


@gluon.jit
def survives(i, j, half_i, half_j, n, seed, stream, dropout_p):
    """Whether dropout keeps entry ``(i, j)``, the same function as in ``long/tiles.py``."""
    factor = gl.to_tensor(0xD256D193).to(gl.uint32)
    low = (half_i * ((n + 1) // 2) + half_j).to(gl.uint32)
    high = (low * 0) + stream.to(gl.uint32)
    key = seed.to(gl.uint32)
    for _ in gl.static_range(7):
        product_low = low * factor
        low = gl.umulhi(low, factor) ^ key ^ high
        high = product_low
        key = key + gl.to_tensor(0x9E3779B9).to(gl.uint32)
    word = gl.where((i & 1) != 0, high, low)
    number = (word >> ((j & 1) * 16).to(gl.uint32)) & 0xFFFF
    return number.to(gl.int32).to(gl.float32) + 0.5 >= dropout_p * 65536.0
