"""What the backward kernels for Hopper share: tiles, products and masks."""

# ruff: noqa: RET505, SIM102 - Gluon compiles a subset of Python

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from gfsa.kernels import problem

LOG2E = gl.constexpr(1.4426950408889634)
KEY_MASK = gl.constexpr(problem.KEY_MASK)
SPANS = gl.constexpr(problem.SPANS)
# tiles and vectors as products and threads read them, whatever the copy engine's shape
FLAT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# compiled code must not depend on these numbers, nor on the alignment of these tensors
JIT_OPTIONS = {
    "do_not_specialize": ["heads", "mask_b", "mask_h", "mask_j"],
    "do_not_specialize_on_alignment": ["coeffs", "dc_out", "mask", "sums"],
}


@gluon.jit
def tile_of(room, ROWS: gl.constexpr, D: gl.constexpr):
    """Shared memory of one tile as a matrix."""
    return room._reinterpret(room.dtype, [ROWS, D], FLAT)


@gluon.jit
def vector_of(room, LENGTH: gl.constexpr, LAYOUT: gl.constexpr):
    """A number for each column of a product."""
    return room._reinterpret(gl.float32, [LENGTH], VECTOR).load(gl.SliceLayout(0, LAYOUT))


@gluon.jit
def scores(x, y, total, ADD: gl.constexpr, D: gl.constexpr, USED: gl.constexpr):
    """Begin ``x·yᵀ``, added to ``total`` or not, over the first USED of D features.

    That is one product, or two if not all features are used.
    """
    if USED == D:
        return warpgroup_mma(x, y.permute((1, 0)), total, use_acc=ADD, is_async=True)
    else:
        REST: gl.constexpr = USED - 64
        low = y.slice(0, 64, dim=1).permute((1, 0))
        high = y.slice(64, REST, dim=1).permute((1, 0))
        total = warpgroup_mma(x.slice(0, 64, dim=1), low, total, use_acc=ADD, is_async=True)
        return warpgroup_mma(x.slice(64, REST, dim=1), high, total, is_async=True)


@gluon.jit
def place():
    """``(block, blocks, head, heads)`` of a program, heads counted over all sequences.

    The grid is (heads of a group, blocks, groups): a block of all heads of the group, then the next
    one. Rows end with short loops, and so does the launch, where whole heads one after another
    would leave the last one's long loops alone at the end.
    """
    together = gl.num_programs(0)
    head = gl.program_id(2) * together + gl.program_id(0)
    return gl.program_id(1), gl.num_programs(1), head, gl.num_programs(2) * together


@gluon.jit
def barriers(COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for x in gl.static_range(COUNT):
        mbarrier.init(bars.index(x), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return bars


@gluon.jit
def queries_of_keys(
    mask, b, row, n, mask_b, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
):  # fmt: skip
    """Which queries see the BM keys from ``row`` on.

    Returns:
        The first of them, the number of steps of BN that reach the last one, the last query of the
        first key, and the mask of this sequence.
    """
    start = 0
    if CAUSAL:
        start = row
    end = n
    earliest = n
    if MASK == SPANS:
        mask += b.to(gl.int64) * mask_b
        earliest = gl.load(mask + n + row)
        end = gl.load(mask + n + gl.minimum(row + BM, n) - 1) + 1
    return start, gl.cdiv(end - start, BN), earliest, mask


@gluon.jit
def shown_keys(mask, b, h, j, n, mask_b, mask_h, mask_j):
    """Which of the keys ``j`` take part; keys beyond the last one do not."""
    mask += b.to(gl.int64) * mask_b + h.to(gl.int64) * mask_h
    # the stride is the caller's: the last key may lie 2³¹ or more behind the first
    return gl.load(mask + j.to(gl.int64) * mask_j, mask=j < n, other=0) != 0


@gluon.jit
def hide_queries(p, row, col, spans, earliest, n, CAUSAL: gl.constexpr, MASK: gl.constexpr):
    """``Aᵀ`` of keys from ``row`` on and queries from ``col`` on, zero where a key is not seen.

    Args:
        spans: first keys of all queries, then last queries of all keys; neither decreases.
        earliest: the last query of the first key, which is the least of these keys' last queries.
    """
    LAYOUT: gl.constexpr = p.type.layout
    BM: gl.constexpr = p.shape[0]
    BN: gl.constexpr = p.shape[1]
    if MASK == SPANS:
        if col + BN - 1 > earliest:
            i = col + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
            j = row + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
            # loaded here, for few tiles: registers are short
            last = gl.load(spans + n + j, mask=j < n, other=-1)
            p = gl.where(i[None, :] <= last[:, None], p, 0.0)
    if CAUSAL:
        if col < row + BM:
            i = col + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
            j = row + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
            p = gl.where(j[:, None] <= i[None, :], p, 0.0)
    return p
