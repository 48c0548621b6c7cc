"""Steps of the long kernels on one tile: mask its scores, drop entries."""

from __future__ import annotations

import triton
import triton.language as tl

from gfsa.kernels import problem

LOG2E = tl.constexpr(1.4426950408889634)

# for kernels that are launched directly: compiled code must not depend on numbers that are not in
# the launch's variant, nor on the alignment of tensors that come from the caller or are slices
JIT_OPTIONS = {
    "do_not_specialize": ["heads", "parts", "mask_b", "mask_h", "mask_i", "mask_j"],
    "do_not_specialize_on_alignment": [
        *("coeffs", "dc_out", "mask", "seed_in", "theta", "base", "basis"),
    ],
}

NO_MASK = tl.constexpr(problem.NO_MASK)
KEY_MASK = tl.constexpr(problem.KEY_MASK)
FULL_MASK = tl.constexpr(problem.FULL_MASK)
SPANS = tl.constexpr(problem.SPANS)


@triton.jit
def masked_tile(col, clear, stop):
    """The tile to be masked that a loop has reached: those in ``clear … stop`` are left out."""
    return tl.where(col < clear, col, col + (stop - clear))


@triton.jit
def allowed(
    i, j, n, mask, first, last, row_stride, col_stride, CAUSAL: tl.constexpr, MASK: tl.constexpr
):
    """Whether query ``i`` sees key ``j``; the two indices broadcast, in either orientation.

    With spans, the kernel passes what it knows of the rows it owns: ``first``, the first key of
    each query ``i``, or ``last``, the last query of each key ``j``; the other is None.
    """
    if MASK == SPANS:
        # keys beyond the last one are later than every query that is stored
        keep = j <= i
        if first is not None:
            keep = keep & (j >= first)
        if last is not None:
            keep = keep & (i <= last)
    else:
        keep = j < n
        if CAUSAL:
            keep = keep & (j <= i)
    # the strides are the caller's: the last entry may lie 2³¹ or more behind the first
    if MASK == KEY_MASK:
        at = j.to(tl.int64) * col_stride
        keep = keep & (tl.load(mask + at, mask=j < n, other=0) != 0)
    if MASK == FULL_MASK:
        at = i.to(tl.int64) * row_stride + j.to(tl.int64) * col_stride
        keep = keep & (tl.load(mask + at, mask=(i < n) & (j < n), other=0) != 0)
    return keep


@triton.jit
def probabilities(
    s, lse, i, j, n, mask, first, last, scale, mask_i, mask_j,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """``A = exp(scale·S − LSE)`` of one tile, zero where a query does not see a key."""
    if MASKED:
        keep = allowed(i, j, n, mask, first, last, mask_i, mask_j, CAUSAL, MASK)
        if MASK == SPANS:
            # before the exponential, where the compiler need not keep the comparisons
            lse = tl.where(keep, lse, float("inf"))
    p = tl.exp2(s * (scale * LOG2E) - lse)
    if MASKED and MASK != SPANS:
        p = tl.where(keep, p, 0.0)
    return p


@triton.jit
def survives(i, j, half_i, half_j, n, seed, stream, dropout_p):
    """Whether dropout keeps entry ``(i, j)``: a function of the entry and the seed alone.

    Every pass over the attention map, in any order and orientation, drops the same entries. Four
    neighbours share one draw of Philox2x32 with 7 rounds, 16 bits each, with the counter
    ``(half_i·⌈n/2⌉ + half_j, stream)``. The caller passes the halves, so that the compiler sees
    which entries of a tile share a draw.
    """
    low = (half_i * ((n + 1) // 2) + half_j).to(tl.uint32)
    high = (low * 0) + stream.to(tl.uint32)
    key = seed.to(tl.uint32)
    for _ in tl.static_range(7):
        product_high = tl.umulhi(low, 0xD256D193)
        low, high = product_high ^ key ^ high, tl.mul(low, 0xD256D193, sanitize_overflow=False)
        key = tl.add(key, 0x9E3779B9, sanitize_overflow=False)
    word = tl.where((i & 1) != 0, high, low)
    number = (word >> ((j & 1) * 16).to(tl.uint32)) & 0xFFFF
    return number.to(tl.int32).to(tl.float32) + 0.5 >= dropout_p * 65536.0
