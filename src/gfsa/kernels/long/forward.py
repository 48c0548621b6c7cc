r"""Forward kernels: ``U = A·V`` with its logsumexp, then ``out = c0·V + c1·U + c2·A·U``.

The second pass knows the logsumexp of every row, so ``A = exp(S − LSE)`` needs no running maximum
and no rescaling, and the combination with V and U happens before the result leaves the registers.

Tensors come as descriptors over ``(B, H, N, D)`` with any strides, read and written by the copy
engine: rows beyond N and columns beyond D read as zero and are not written.

Under causality the loop over keys ends at the diagonal. With spans (documents, windows) it also
begins at the first key that the block's first query sees, so hidden tiles cost nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfsa.kernels.long.tiles import (
    JIT_OPTIONS,
    LOG2E,
    NO_MASK,
    SPANS,
    allowed,
    masked_tile,
    probabilities,
    survives,
)
from gfsa.kernels.tile_access import load_tile, store_tile


@triton.jit(**JIT_OPTIONS)
def attend(
    q_rows, k_cols, v_cols, u_rows, lse_out, mask, seed_in,
    heads, group, n, scale, mask_b, mask_h, mask_i, mask_j, dropout_p,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """First pass, one block of BM queries: ``U = A·V`` and the logsumexp of the scores."""
    block = tl.program_id(0)
    if CAUSAL:
        # the longest rows first
        block = tl.num_programs(0) - 1 - block
    bh = tl.program_id(1)
    b = bh // heads
    h = bh % heads
    row = block * BM
    mask += b.to(tl.int64) * mask_b + h.to(tl.int64) * mask_h
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_in)
    i = row + tl.arange(0, BM)
    first = None
    if MASK == SPANS:
        # loaded while the copy engine brings the queries
        first = tl.load(mask + i, mask=i < n, other=0)
    clear, stop, start, end = key_ranges(row, n, mask, first, BM, BN, CAUSAL, MASK)
    q = load_tile(q_rows, b, h, row, BM, D)
    half_i = row // 2 + tl.arange(0, BM) // 2
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    top, total, acc = _attend_range(
        top, total, acc, q, k_cols, v_cols, mask, first, seed, b, h // group, bh, i, half_i, n,
        clear, stop, clear, stop, scale, mask_i, mask_j, dropout_p,
        D, BN, STAGES, CAUSAL, MASK, DROPOUT, False,
    )  # fmt: skip
    if MASK == SPANS:
        sees = first < stop
        top = tl.where(sees, top, float("-inf"))
        total = tl.where(sees, total, 0.0)
        acc = tl.where(sees[:, None], acc, 0.0)
        first = first[:, None]
    top, total, acc = _attend_range(
        top, total, acc, q, k_cols, v_cols, mask, first, seed, b, h // group, bh, i, half_i, n,
        start, end, clear, stop, scale, mask_i, mask_j, dropout_p,
        D, BN, STAGES, CAUSAL, MASK, DROPOUT, True,
    )  # fmt: skip
    # a row without keys: its map is zero, and an infinite logsumexp makes it so in later passes
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    if DROPOUT:
        acc = acc / (1.0 - dropout_p)
    store_tile(u_rows, acc / total[:, None], b, h, row, BM, D)
    lse = tl.where(empty, float("inf"), (top + tl.log2(total)) / LOG2E)
    tl.store(lse_out + bh.to(tl.int64) * n + i, lse, mask=i < n)


@triton.jit
def key_ranges(
    row, n, spans, first,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Keys ``clear … stop`` that a block of queries sees in full, ``start … end`` to be masked.

    With spans the keys to be masked lie on both sides of the others, and ``start … end`` counts
    them as if the others were not there: see :func:`masked_tile`. Of the keys ``clear … stop`` a
    query sees all, or none if its document begins later: the caller leaves out its row.

    Args:
        spans, first: first keys of all queries and of the block's.
    """
    clear = 0
    stop = n // BN * BN
    end = n
    if CAUSAL:
        stop = row // BN * BN
        end = tl.minimum(n, row + BM)
    if MASK == SPANS:
        # first keys do not decrease from query to query
        start = tl.load(spans + row) // BN * BN
        latest = tl.maximum(tl.max(tl.where(first < stop, first, 0), 0), start)
        clear = tl.minimum(tl.cdiv(latest, BN) * BN, stop)
        end -= stop - clear
    else:
        if MASK != NO_MASK:
            stop = 0
        start = stop
    return clear, stop, start, end


@triton.jit
def _attend_range(
    top, total, acc, q, k_cols, v_cols, mask, first, seed, b, h, bh, i, half_i, n,
    start, end, clear, stop, scale, mask_i, mask_j, dropout_p,
    D: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BN)
    for step in tl.range(start, end, BN, num_stages=STAGES):
        col = step
        if MASKED and MASK == SPANS:
            col = masked_tile(step, clear, stop)
        j = col + columns
        half_j = col // 2 + columns // 2
        k = load_tile(k_cols, b, h, col, BN, D)
        s = tl.dot(q, tl.trans(k)) * (scale * LOG2E)
        if MASKED:
            keep = allowed(
                i[:, None], j[None, :], n, mask, first, None, mask_i, mask_j, CAUSAL, MASK
            )
            s = tl.where(keep, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shift = new_top
        if MASKED and MASK != NO_MASK:
            # −inf minus −inf is NaN
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(p, 1)
        if DROPOUT:
            kept = survives(
                i[:, None], j[None, :], half_i[:, None], half_j[None, :], n, seed, bh, dropout_p
            )
            p = tl.where(kept, p, 0.0)
        v = load_tile(v_cols, b, h, col, BN, D)
        acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None])
        top = new_top
    return top, total, acc


@triton.jit(**JIT_OPTIONS)
def combine(
    q_rows, k_cols, u_cols, u_rows, v_rows, out_rows, lse_in, coeffs, mask, seed_in,
    heads, group, n, scale, mask_b, mask_h, mask_i, mask_j, dropout_p,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Second pass, one block of BM queries: ``out = c0·V + c1·U + c2·A·U``."""
    block = tl.program_id(0)
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block
    bh = tl.program_id(1)
    b = bh // heads
    h = bh % heads
    row = block * BM
    mask += b.to(tl.int64) * mask_b + h.to(tl.int64) * mask_h
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_in)
    i = row + tl.arange(0, BM)
    first = None
    if MASK == SPANS:
        # loaded while the copy engine brings the queries
        first = tl.load(mask + i, mask=i < n, other=0)
    clear, stop, start, end = key_ranges(row, n, mask, first, BM, BN, CAUSAL, MASK)
    q = load_tile(q_rows, b, h, row, BM, D)
    half_i = row // 2 + tl.arange(0, BM) // 2
    lse = tl.load(lse_in + bh.to(tl.int64) * n + i, mask=i < n, other=float("inf")) * LOG2E
    acc = tl.zeros((BM, D), tl.float32)
    clear_lse = lse
    if MASK == SPANS:
        clear_lse = tl.where(first < stop, lse, float("inf"))
        first = first[:, None]
    acc = _combine_range(
        acc, q, k_cols, u_cols, clear_lse, mask, first, seed, b, h, h // group, bh, i, half_i, n,
        clear, stop, clear, stop, scale, mask_i, mask_j, dropout_p,
        D, BN, STAGES, CAUSAL, MASK, DROPOUT, False,
    )  # fmt: skip
    acc = _combine_range(
        acc, q, k_cols, u_cols, lse, mask, first, seed, b, h, h // group, bh, i, half_i, n,
        start, end, clear, stop, scale, mask_i, mask_j, dropout_p,
        D, BN, STAGES, CAUSAL, MASK, DROPOUT, True,
    )  # fmt: skip
    if DROPOUT:
        acc = acc / (1.0 - dropout_p)
    c0 = tl.load(coeffs + h * 3)
    c1 = tl.load(coeffs + h * 3 + 1)
    c2 = tl.load(coeffs + h * 3 + 2)
    v = load_tile(v_rows, b, h // group, row, BM, D).to(tl.float32)
    u = load_tile(u_rows, b, h, row, BM, D).to(tl.float32)
    store_tile(out_rows, c0 * v + c1 * u + c2 * acc, b, h, row, BM, D)


@triton.jit
def _combine_range(
    acc, q, k_cols, u_cols, lse, mask, first, seed, b, h, key_head, bh, i, half_i, n,
    start, end, clear, stop, scale, mask_i, mask_j, dropout_p,
    D: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BN)
    for step in tl.range(start, end, BN, num_stages=STAGES):
        col = step
        if MASKED and MASK == SPANS:
            col = masked_tile(step, clear, stop)
        j = col + columns
        half_j = col // 2 + columns // 2
        k = load_tile(k_cols, b, key_head, col, BN, D)
        s = tl.dot(q, tl.trans(k))
        p = probabilities(
            s, lse[:, None], i[:, None], j[None, :], n, mask, first, None, scale, mask_i, mask_j,
            CAUSAL, MASK, MASKED,
        )  # fmt: skip
        if DROPOUT:
            kept = survives(
                i[:, None], j[None, :], half_i[:, None], half_j[None, :], n, seed, bh, dropout_p
            )
            p = tl.where(kept, p, 0.0)
        u = load_tile(u_cols, b, h, col, BN, D)
        acc = tl.dot(p.to(q.dtype), u, acc)
    return acc
