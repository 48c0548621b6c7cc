r"""Two passes in Triton, one launch each, for any length: the filter, then its gradient.

**Forward**: ``U = A·V`` with its logsumexp, then ``out = c0·V + c1·U + c2·A·U``. The second pass
knows the logsumexp of every row, so ``A = exp(S − LSE)`` needs no running maximum and no rescaling,
and the combination with V and U happens before the result leaves the registers.

**Gradient.** With g the gradient of the output, U = A·V and z = Aᵀ·g:

.. math::
    dU = c_1 g + c_2 z, \qquad dV = c_0 g + A^\top dU, \qquad dA = c_2\,g U^\top + dU\,V^\top, \\
    dS = A \circ (dA - \delta), \qquad
    \delta_i = \langle g, out\rangle_i - c_0 \langle g, V\rangle_i + c_2 \langle z, U\rangle_i, \\
    dc_0 = \sum \langle g, V\rangle, \quad dc_1 = \sum \langle g, U\rangle, \quad
    dc_2 = \sum \langle z, U\rangle .

δ is the row sum of A∘dA, written so that A·U is neither saved nor computed again. Each number is
written by one program, so repeated runs give the same bits; the coefficients' gradients are
partial sums, one a block, to be added up in float32.

Tensors come as descriptors over ``(B, H, N, D)`` with any strides, read and written by the copy
engine: rows beyond N and columns beyond D read as zero and are not written. Under causality the
loop over keys ends at the diagonal. With spans (documents, windows) it also begins at the first key
that the block's first query sees, so hidden tiles cost nothing. Names in capitals are known when
a kernel is compiled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend

from gfsa.kernels import launching
from gfsa.kernels.launching import (
    JIT_OPTIONS,
    LOG2E,
    Forward,
    Given,
    Gradients,
    Inputs,
    Kernel,
    Launch,
    Launches,
    Options,
    Prepared,
    Problem,
    Saved,
    Tiles,
    copyable_by_tile,
    empty_like,
    load_tile,
    on_device_of,
    padded,
    problem_of,
    room,
    room_like,
    rooms_by_query_head,
    store_tile,
    sum_groups,
    tiles_of,
)

NO_MASK = tl.constexpr(launching.NO_MASK)
KEY_MASK = tl.constexpr(launching.KEY_MASK)
FULL_MASK = tl.constexpr(launching.FULL_MASK)
SPANS = tl.constexpr(launching.SPANS)


@triton.jit
def masked_tile(col, clear, stop):
    """The tile to be masked that a loop has reached: those in ``clear … stop`` are left out."""
    return tl.where(col < clear, col, col + (stop - clear))


@triton.jit
def allowed(i, j, n, masks, first, last, CAUSAL, MASK):
    """Whether query ``i`` sees key ``j``; the two indices broadcast, in either orientation.

    With spans, the kernel passes what it knows of the rows it owns: ``first``, the first key of
    each query ``i``, or ``last``, the last query of each key ``j``; the other is None.
    """
    mask, row_stride, col_stride = masks
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
def probabilities(s, lse, i, j, n, masks, first, last, scale, CAUSAL, MASK, MASKED):
    """``A = exp(scale·S − LSE)`` of one tile, zero where a query does not see a key."""
    if MASKED:
        keep = allowed(i, j, n, masks, first, last, CAUSAL, MASK)
        if MASK == SPANS:
            # before the exponential, where the compiler need not keep the comparisons
            lse = tl.where(keep, lse, float("inf"))
    p = tl.exp2(s * (scale * LOG2E) - lse)
    if MASKED and MASK != SPANS:
        p = tl.where(keep, p, 0.0)
    return p


@triton.jit
def survives(i, j, half_i, half_j, n, stream, drawn):
    """Whether dropout keeps entry ``(i, j)``: a function of the entry and the seed alone.

    Every pass over the attention map, in any order and orientation, drops the same entries. Four
    neighbours share one draw of Philox2x32 with 7 rounds, 16 bits each, with the counter
    ``(half_i·⌈n/2⌉ + half_j, stream)``. The caller passes the halves, so that the compiler sees
    which entries of a tile share a draw.
    """
    seed, dropout_p = drawn
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


@triton.jit
def own_rows(heads, mask, mask_b, mask_h, seed_in, BM, LAST_FIRST, DROPOUT):
    """``(block, row, sequence, head, head of all sequences)``, then the head's mask and the seed.

    Args:
        LAST_FIRST: under causality the longest rows first.
    """
    block = tl.program_id(0)
    if LAST_FIRST:
        block = tl.num_programs(0) - 1 - block
    bh = tl.program_id(1)
    b = bh // heads
    h = bh % heads
    row = block * BM
    mask += b.to(tl.int64) * mask_b + h.to(tl.int64) * mask_h
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_in)
    return block, row, b, h, bh, mask, seed


@triton.jit
def key_ranges(row, i, n, spans, BM, BN, CAUSAL, MASK):
    """First keys of the queries ``i``, with spans alone; then ``(clear, stop, start, end)``.

    The queries see the keys ``clear … stop`` in full; ``start … end`` are to be masked. With spans
    the latter lie on both sides of the others, and are counted as if the others were not there: see
    :func:`masked_tile`. Of the keys ``clear … stop`` a query sees all, or none if its document
    begins later: the caller leaves out its row.

    Args:
        spans: first keys of all queries.
    """
    first = i
    if MASK == SPANS:
        # loaded while the copy engine brings the queries
        first = tl.load(spans + i, mask=i < n, other=0)
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
    return first, (clear, stop, start, end)


@triton.jit(**JIT_OPTIONS)
def attend(
    q_rows, k_cols, v_cols, u_rows, lse_out, mask, seed_in,
    heads, group, n, scale, mask_b, mask_h, mask_i, mask_j, dropout_p,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """First pass, one block of BM queries: ``U = A·V`` and the logsumexp of the scores."""
    _, row, b, h, bh, mask, seed = own_rows(
        heads, mask, mask_b, mask_h, seed_in, BM, CAUSAL, DROPOUT
    )
    i = row + tl.arange(0, BM)
    first, ranges = key_ranges(row, i, n, mask, BM, BN, CAUSAL, MASK)
    q = load_tile(q_rows, b, h, row, BM, D)
    half_i = row // 2 + tl.arange(0, BM) // 2
    key_head = h // group
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    clear, stop, start, end = ranges
    # keys that the whole block sees, then those to be masked
    for MASKED in tl.static_range(2):
        if MASKED and MASK == SPANS:
            sees = first < stop
            top = tl.where(sees, top, float("-inf"))
            total = tl.where(sees, total, 0.0)
            acc = tl.where(sees[:, None], acc, 0.0)
            first = first[:, None]
        columns = tl.arange(0, BN)
        for step in tl.range(
            start if MASKED else clear, end if MASKED else stop, BN, num_stages=STAGES
        ):
            col = step
            if MASKED and MASK == SPANS:
                col = masked_tile(step, clear, stop)
            j = col + columns
            half_j = col // 2 + columns // 2
            k = load_tile(k_cols, b, key_head, col, BN, D)
            s = tl.dot(q, tl.trans(k)) * (scale * LOG2E)
            if MASKED:
                masks = (mask, mask_i, mask_j)
                keep = allowed(i[:, None], j[None, :], n, masks, first, None, CAUSAL, MASK)
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
                    i[:, None], j[None, :], half_i[:, None], half_j[None, :], n, bh,
                    (seed, dropout_p),
                )  # fmt: skip
                p = tl.where(kept, p, 0.0)
            v = load_tile(v_cols, b, key_head, col, BN, D)
            acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None])
            top = new_top
    # a row without keys: its map is zero, and an infinite logsumexp makes it so in later passes
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    if DROPOUT:
        acc = acc / (1.0 - dropout_p)
    store_tile(u_rows, acc / total[:, None], b, h, row, BM, D)
    lse = tl.where(empty, float("inf"), (top + tl.log2(total)) / LOG2E)
    tl.store(lse_out + bh.to(tl.int64) * n + i, lse, mask=i < n)


@triton.jit(**JIT_OPTIONS)
def combine(
    q_rows, k_cols, u_cols, u_rows, v_rows, out_rows, lse_in, coeffs, mask, seed_in,
    heads, group, n, scale, mask_b, mask_h, mask_i, mask_j, dropout_p,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Second pass, one block of BM queries: ``out = c0·V + c1·U + c2·A·U``."""
    _, row, b, h, bh, mask, seed = own_rows(
        heads, mask, mask_b, mask_h, seed_in, BM, CAUSAL, DROPOUT
    )
    i = row + tl.arange(0, BM)
    first, ranges = key_ranges(row, i, n, mask, BM, BN, CAUSAL, MASK)
    q = load_tile(q_rows, b, h, row, BM, D)
    half_i = row // 2 + tl.arange(0, BM) // 2
    lse = tl.load(lse_in + bh.to(tl.int64) * n + i, mask=i < n, other=float("inf")) * LOG2E
    acc = tl.zeros((BM, D), tl.float32)
    acc = _over_keys(
        acc, q, None, None, lse, None, k_cols, None, u_cols, first, (b, h, h // group, bh, n),
        (i, half_i), ranges, scale, (mask, mask_i, mask_j), (seed, dropout_p),
        D, BN, STAGES, CAUSAL, MASK, DROPOUT, False,
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
def _over_keys(
    acc, q, g, du, lse, delta, k_cols, v_cols, u_cols, first, place, rows, ranges, scale, masks,
    drawn, D, BN, STAGES, CAUSAL, MASK, DROPOUT, GRADIENT,
):  # fmt: skip
    """``acc + A·U`` of a block of queries; GRADIENT: ``acc + dS·K``."""
    b, h, key_head, bh, n = place
    i, half_i = rows
    clear, stop, start, end = ranges
    seen_lse = lse
    if MASK == SPANS:
        seen_lse = tl.where(first < stop, lse, float("inf"))
        first = first[:, None]
    # keys that the whole block sees, then those to be masked
    for MASKED in tl.static_range(2):
        columns = tl.arange(0, BN)
        for step in tl.range(
            start if MASKED else clear, end if MASKED else stop, BN, num_stages=STAGES
        ):
            col = step
            if MASKED and MASK == SPANS:
                col = masked_tile(step, clear, stop)
            j = col + columns
            half_j = col // 2 + columns // 2
            k = load_tile(k_cols, b, key_head, col, BN, D)
            s = tl.dot(q, tl.trans(k))
            p = probabilities(
                s, (lse if MASKED else seen_lse)[:, None], i[:, None], j[None, :], n, masks, first,
                None, scale, CAUSAL, MASK, MASKED,
            )  # fmt: skip
            if GRADIENT:
                u = load_tile(u_cols, b, h, col, BN, D)
                v = load_tile(v_cols, b, key_head, col, BN, D)
                da = tl.dot(g, tl.trans(u))
                da = tl.dot(du, tl.trans(v), da)
            if DROPOUT:
                kept = survives(
                    i[:, None], j[None, :], half_i[:, None], half_j[None, :], n, bh, drawn
                )
            if GRADIENT:
                if DROPOUT:
                    da = tl.where(kept, da / (1.0 - drawn[1]), 0.0)
                ds = p * (da - delta[:, None])
                acc = tl.dot(ds.to(q.dtype), k, acc)
            else:
                if DROPOUT:
                    p = tl.where(kept, p, 0.0)
                u = load_tile(u_cols, b, h, col, BN, D)
                acc = tl.dot(p.to(q.dtype), u, acc)
    return acc


@triton.jit
def query_ranges(row, j, n, spans, BM, BN, CAUSAL, MASK):
    """Last queries of the keys ``j``, with spans alone; then ``(clear, stop, start, end)``.

    As :func:`key_ranges`: the queries ``clear … stop`` see the whole block of keys, but none of
    them sees a key whose document ends before ``clear``.

    Args:
        spans: first keys of all queries, then last queries of all keys.
    """
    last = j
    if MASK == SPANS:
        # loaded while the copy engine brings the keys
        last = tl.load(spans + n + j, mask=j < n, other=-1)
    start = 0
    clear = 0
    stop = n
    if CAUSAL:
        start = row // BN * BN
        clear = tl.minimum(tl.cdiv(row + BM, BN) * BN, n)
    if MASK == SPANS:
        # last queries, which lie behind the first keys, do not decrease from key to key
        end = tl.load(spans + n + tl.minimum(row + BM, n) - 1) + 1
        clear = tl.minimum(tl.cdiv(row + BM, BN), tl.cdiv(end, BN)) * BN
        earliest = tl.min(tl.where(last >= clear, last + 1, end), 0)
        stop = tl.maximum(earliest // BN * BN, clear)
        end -= stop - clear
    else:
        if MASK != NO_MASK:
            clear = n
        end = clear
    return last, (clear, stop, start, end)


@triton.jit(**JIT_OPTIONS)
def grad_first_pass(
    q_cols, k_rows, g_cols, g_rows, v_rows, u_rows, out_rows, du_rows, delta_out, dc_out,
    lse_in, coeffs, mask, seed_in,
    heads, group, n, scale, mask_b, mask_h, mask_i, mask_j, dropout_p,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """``z = Aᵀ·g`` for BM keys, then dU, δ and the coefficients' gradients of these rows."""
    block, row, b, h, bh, mask, seed = own_rows(
        heads, mask, mask_b, mask_h, seed_in, BM, False, False
    )
    lse_in += bh.to(tl.int64) * n
    if DROPOUT:
        seed = tl.load(seed_in)
    j = row + tl.arange(0, BM)
    last, ranges = query_ranges(row, j, n, mask, BM, BN, CAUSAL, MASK)
    k = load_tile(k_rows, b, h // group, row, BM, D)
    half_j = row // 2 + tl.arange(0, BM) // 2
    z = tl.zeros((BM, D), tl.float32)
    # there is no gradient of keys yet, and the tiles of dU are g's
    _, z = _over_queries(
        z, z, k, None, None, q_cols, g_cols, g_cols, None, lse_in, last, (b, h, bh, n),
        (j, half_j), ranges, scale, (mask, mask_i, mask_j), (seed, dropout_p),
        D, BN, STAGES, CAUSAL, MASK, DROPOUT, False,
    )  # fmt: skip
    if DROPOUT:
        z = z / (1.0 - dropout_p)
    # rows beyond the last key hold arbitrary numbers, infinities included
    z = tl.where(j[:, None] < n, z, 0.0)
    c0 = tl.load(coeffs + h * 3)
    c1 = tl.load(coeffs + h * 3 + 1)
    c2 = tl.load(coeffs + h * 3 + 2)
    g = load_tile(g_rows, b, h, row, BM, D).to(tl.float32)
    u = load_tile(u_rows, b, h, row, BM, D).to(tl.float32)
    v = load_tile(v_rows, b, h // group, row, BM, D).to(tl.float32)
    out = load_tile(out_rows, b, h, row, BM, D).to(tl.float32)
    gv = tl.sum(g * v, 1)
    zu = tl.sum(z * u, 1)
    # both axes at once: Triton 3.6 does not compile the sum of zu for Blackwell, whose products lie
    # in memory of their own; here, where it takes fewer registers than beside its store
    dc2 = tl.sum(z * u)
    delta = tl.sum(g * out, 1) - c0 * gv + c2 * zu
    tl.store(delta_out + bh.to(tl.int64) * n + j, delta, mask=j < n)
    # (H, 3, B·blocks): what is added up is contiguous
    parts = tl.num_programs(1) // heads * tl.num_programs(0)
    dc = dc_out + h * 3 * parts + b * tl.num_programs(0) + block
    tl.store(dc, tl.sum(gv, 0))
    tl.store(dc + parts, tl.sum(tl.sum(g * u, 1), 0))
    tl.store(dc + 2 * parts, dc2)
    store_tile(du_rows, c1 * g + c2 * z, b, h, row, BM, D)


@triton.jit(**JIT_OPTIONS)
def grad_keys(
    q_cols, k_rows, v_rows, u_rows, g_cols, g_rows, du_cols, dk_rows, dv_rows,
    delta_in, lse_in, coeffs, mask, seed_in,
    heads, group, n, scale, mask_b, mask_h, mask_i, mask_j, dropout_p,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """``dK = dSᵀ·Q·scale`` and ``dV = c0·g + Aᵀ·dU`` for BM keys of one query head."""
    _, row, b, h, bh, mask, seed = own_rows(heads, mask, mask_b, mask_h, seed_in, BM, False, False)
    lse_in += bh.to(tl.int64) * n
    delta_in += bh.to(tl.int64) * n
    if DROPOUT:
        seed = tl.load(seed_in)
    c0 = tl.load(coeffs + h * 3)
    c2 = tl.load(coeffs + h * 3 + 2)
    j = row + tl.arange(0, BM)
    last, ranges = query_ranges(row, j, n, mask, BM, BN, CAUSAL, MASK)
    k = load_tile(k_rows, b, h // group, row, BM, D)
    v = load_tile(v_rows, b, h // group, row, BM, D)
    u = load_tile(u_rows, b, h, row, BM, D)
    u = (u.to(tl.float32) * c2).to(k.dtype)
    half_j = row // 2 + tl.arange(0, BM) // 2
    dk = tl.zeros((BM, D), tl.float32)
    dv = tl.zeros((BM, D), tl.float32)
    dk, dv = _over_queries(
        dk, dv, k, v, u, q_cols, g_cols, du_cols, delta_in, lse_in, last, (b, h, bh, n),
        (j, half_j), ranges, scale, (mask, mask_i, mask_j), (seed, dropout_p),
        D, BN, STAGES, CAUSAL, MASK, DROPOUT, True,
    )  # fmt: skip
    if DROPOUT:
        dv = dv / (1.0 - dropout_p)
    g = load_tile(g_rows, b, h, row, BM, D).to(tl.float32)
    store_tile(dk_rows, dk * scale, b, h, row, BM, D)
    store_tile(dv_rows, c0 * g + dv, b, h, row, BM, D)


@triton.jit
def _over_queries(
    dk, dv, k, v, u, q_cols, g_cols, du_cols, delta_in, lse_in, last, place, rows, ranges, scale,
    masks, drawn, D, BN, STAGES, CAUSAL, MASK, DROPOUT, SCORES,
):  # fmt: skip
    """``dv + Aᵀ·dU`` of a block of keys and, with the gradient of SCORES, ``dk + dSᵀ·Q``."""
    b, h, bh, n = place
    j, half_j = rows
    clear, stop, start, end = ranges
    # the queries to be masked come first; with spans last, where sums of hidden ones are dropped
    for MASKED in tl.static_range(
        0 if MASK == SPANS else 1, 2 if MASK == SPANS else -1, 1 if MASK == SPANS else -1
    ):
        if MASKED and MASK == SPANS:
            seen = (last >= clear)[:, None]
            dk = tl.where(seen, dk, 0.0)
            dv = tl.where(seen, dv, 0.0)
            last = last[:, None]
        columns = tl.arange(0, BN)
        for step in tl.range(
            start if MASKED else clear, end if MASKED else stop, BN, num_stages=STAGES
        ):
            col = step
            if MASKED and MASK == SPANS:
                col = masked_tile(step, clear, stop)
            i = col + columns
            half_i = col // 2 + columns // 2
            q = load_tile(q_cols, b, h, col, BN, D)
            lse = tl.load(lse_in + i, mask=i < n, other=float("inf")) * LOG2E
            s = tl.dot(k, tl.trans(q))
            p = probabilities(
                s, lse[None, :], i[None, :], j[:, None], n, masks, None, last, scale,
                CAUSAL, MASK, MASKED,
            )  # fmt: skip
            if SCORES:
                du = load_tile(du_cols, b, h, col, BN, D)
                g = load_tile(g_cols, b, h, col, BN, D)
                da = tl.dot(u, tl.trans(g))
                da = tl.dot(v, tl.trans(du), da)
            kept_p = p
            if DROPOUT:
                kept = survives(
                    i[None, :], j[:, None], half_i[None, :], half_j[:, None], n, bh, drawn
                )
                if SCORES:
                    da = tl.where(kept, da / (1.0 - drawn[1]), 0.0)
                kept_p = tl.where(kept, p, 0.0)
            if not SCORES:
                du = load_tile(du_cols, b, h, col, BN, D)
            dv = tl.dot(kept_p.to(k.dtype), du, dv)
            if SCORES:
                delta = tl.load(delta_in + i, mask=i < n, other=0.0)
                ds = p * (da - delta[None, :])
                dk = tl.dot(ds.to(k.dtype), q, dk)
    return dk, dv


@triton.jit(**JIT_OPTIONS)
def grad_queries(
    q_rows, k_cols, v_cols, u_cols, g_rows, du_rows, dq_rows,
    delta_in, lse_in, coeffs, mask, seed_in,
    heads, group, n, scale, mask_b, mask_h, mask_i, mask_j, dropout_p,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """``dQ = dS·K·scale`` for BM queries."""
    _, row, b, h, bh, mask, seed = own_rows(
        heads, mask, mask_b, mask_h, seed_in, BM, CAUSAL, DROPOUT
    )
    c2 = tl.load(coeffs + h * 3 + 2)
    i = row + tl.arange(0, BM)
    first, ranges = key_ranges(row, i, n, mask, BM, BN, CAUSAL, MASK)
    q = load_tile(q_rows, b, h, row, BM, D)
    g = load_tile(g_rows, b, h, row, BM, D)
    g = (g.to(tl.float32) * c2).to(q.dtype)
    du = load_tile(du_rows, b, h, row, BM, D)
    half_i = row // 2 + tl.arange(0, BM) // 2
    at = bh.to(tl.int64) * n + i
    lse = tl.load(lse_in + at, mask=i < n, other=float("inf")) * LOG2E
    delta = tl.load(delta_in + at, mask=i < n, other=0.0)
    dq = tl.zeros((BM, D), tl.float32)
    dq = _over_keys(
        dq, q, g, du, lse, delta, k_cols, v_cols, u_cols, first, (b, h, h // group, bh, n),
        (i, half_i), ranges, scale, (mask, mask_i, mask_j), (seed, dropout_p),
        D, BN, STAGES, CAUSAL, MASK, DROPOUT, True,
    )  # fmt: skip
    store_tile(dq_rows, dq * scale, b, h, row, BM, D)


# by kernel, then by the largest head dim that an entry serves
TILES: dict[str, dict[int, Tiles]] = {
    "attend": {128: Tiles(64, 64, 4, 3), 256: Tiles(64, 64, 8, 2)},
    "combine": {128: Tiles(64, 64, 4, 3), 256: Tiles(64, 64, 8, 2)},
    "grad_first_pass": {128: Tiles(64, 64, 4, 3), 256: Tiles(64, 32, 8, 3)},
    "grad_keys": {64: Tiles(64, 64, 4, 2), 128: Tiles(128, 64, 8, 2), 256: Tiles(64, 32, 8, 2)},
    "grad_queries": {64: Tiles(64, 64, 4, 2), 128: Tiles(128, 64, 8, 2), 256: Tiles(64, 32, 8, 2)},
}

# narrower steps where half of them are masked
CAUSAL_TILES = {"grad_keys": Tiles(64, 32, 4, 2), "grad_first_pass": Tiles(64, 64, 4, 2)}

# documents and windows: less of a narrow tile is hidden at their borders
PACKED_TILES = {
    ("grad_keys", 128): Tiles(64, 32, 4, 3),
    ("grad_queries", 64): Tiles(64, 32, 4, 3),
    ("grad_queries", 128): Tiles(64, 32, 4, 3),
}

# taller tiles where every row sees every key, from this length on
TALL = Tiles(128, 64, 4, 3)
TALL_FROM = {"combine": 2048, "grad_first_pass": 192}


def tiles(kernel: str, problem: Problem) -> Tiles:
    """The tiles of ``kernel`` for one problem."""
    head_dim, length = problem.head_dim, problem.length
    _, is_causal, dropout_p, *_ = problem.options
    limit = padded(max(head_dim, 64))
    if problem.mask_kind == SPANS.value and (kernel, limit) in PACKED_TILES:
        return PACKED_TILES[kernel, limit]
    tall = length >= TALL_FROM.get(kernel, length + 1) and not (is_causal or dropout_p)
    if tall and head_dim <= 64:
        return TALL
    if is_causal and head_dim <= 64 and kernel in CAUSAL_TILES:
        return CAUSAL_TILES[kernel]
    entries = TILES[kernel]
    return entries[min(limit for limit in entries if limit >= head_dim)]


def forward(given: Inputs) -> Forward:
    """As every route of ``op.py``."""
    q, k, v, coeffs, mask, seed, options, *_ = given
    q, k, v = map(copyable_by_tile, (q, k, v))
    if on_device_of(q, cudnn_would_run, q, k, v, mask, options):
        u, lse = on_device_of(q, _cudnn_first_pass, q, k, v, options)
        return _COMBINE((q, k, v, u), (coeffs, lse, seed), mask, options)
    return _FORWARD((q, k, v), (coeffs, seed), mask, options)


def backward(g: Tensor, saved: Saved, options: Options) -> Gradients:
    """As every gradient of ``op.py``."""
    q, k, v, u, out, lse, coeffs, mask, seed, _ = saved
    dq, dk, dv, dc = _BACKWARD((q, k, v, u, out, g), (coeffs, lse, seed), mask, options)
    return dq, sum_groups(dk, k), sum_groups(dv, v), dc


def _prepare_forward(given: Given, options: Options) -> Prepared:
    q = given["q"]
    launches = _launches(problem_of(q, given["k"], given["mask"], options))
    rooms = {"out": room_like(q)}
    steps = [(launches["combine"], "q k u u v out", "lse coeffs mask seed")]
    if "u" not in given:
        rooms |= {"u": room_like(q), "lse": room(q.shape[:3], q, dtype=torch.float32)}
        steps.insert(0, (launches["attend"], "q k v u", "lse mask seed"))
    return Prepared(given, rooms, steps, "out u lse")


def _prepare_backward(given: Given, options: Options) -> Prepared:
    q, lse = given["q"], given["lse"]
    launches = _launches(problem_of(q, given["k"], given["mask"], options))
    parts = q.shape[1], 3, q.shape[0] * launches["grad_first_pass"].grid[0]
    rooms = {"du": room_like(q), "dq": room_like(q), **rooms_by_query_head(given)}
    rooms |= {"delta": room(lse.shape, lse), "parts": room(parts, lse)}
    extra = "lse coeffs mask seed"
    steps = [
        (launches["grad_first_pass"], "q k g g v u out du", f"delta parts {extra}"),
        (launches["grad_keys"], "q k v u g g du dk dv", f"delta {extra}"),
        (launches["grad_queries"], "q k v u g du dq", f"delta {extra}"),
    ]
    return Prepared(given, rooms, steps, "dq dk dv parts")


_FORWARD = Launches[Forward](_prepare_forward, "q k v", "coeffs seed")
_COMBINE = Launches[Forward](_prepare_forward, "q k v u", "coeffs lse seed")
_BACKWARD = Launches[Gradients](_prepare_backward, "q k v u out g", "coeffs lse seed")


def _cudnn_first_pass(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """``U`` and ``LSE`` by the same kernel as torch's attention, so with the same bits."""
    u, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, options.is_causal, False, scale=options.scale
    )
    wanted = empty_like(q)
    u = u if u.stride() == wanted.stride() else wanted.copy_(u)
    return u, lse.view(q.shape[:3])


def cudnn_would_run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options) -> bool:
    """Whether torch's attention would take cuDNN for the first pass."""
    if not q.is_cuda or mask is not None or options.dropout_p or q.shape != k.shape:
        return False
    if options.scale <= 0.0:
        # cuDNN gives NaN for it
        return False
    choice = torch._fused_sdp_choice(
        q, k, v, None, 0.0, options.is_causal, scale=options.scale, enable_gqa=False
    )
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


_KERNELS = {
    function.fn.__name__: Kernel(function)
    for function in (attend, combine, grad_first_pass, grad_keys, grad_queries)
}


def _launches(problem: Problem) -> dict[str, Launch]:
    """Each kernel over the rows of one problem."""
    scale, is_causal, dropout_p, *_ = problem.options
    width, found = padded(problem.head_dim), {}
    for name, kernel in _KERNELS.items():
        cut = tiles(name, problem)
        found[name] = Launch(
            kernel,
            (-(-problem.length // cut.rows), problem.batch * problem.heads, 1),
            problem.variant,
            tiles_of(kernel, cut, width),
            (*problem.sizes, scale, *problem.mask_strides, dropout_p),
            (width, cut.rows, cut.cols, cut.stages, is_causal, problem.mask_kind, dropout_p > 0.0),
            num_warps=cut.warps,
        )
    return found
