r"""Backward kernels. With g the gradient of the output, U = A·V and z = Aᵀ·g:

.. math::
    dU = c_1 g + c_2 z, \qquad dV = c_0 g + A^\top dU, \qquad dA = c_2\,g U^\top + dU\,V^\top, \\
    dS = A \circ (dA - \delta), \qquad
    \delta_i = \langle g, out\rangle_i - c_0 \langle g, V\rangle_i + c_2 \langle z, U\rangle_i, \\
    dc_0 = \sum \langle g, V\rangle, \quad dc_1 = \sum \langle g, U\rangle, \quad
    dc_2 = \sum \langle z, U\rangle .

δ is the row sum of A∘dA, written so that A·U is neither saved nor computed again. Each number is
written by one program, so repeated runs give the same bits; the coefficients' gradients are
partial sums, one a block, to be added up in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfsa.kernels.long.forward import key_ranges
from gfsa.kernels.long.tiles import (
    JIT_OPTIONS,
    LOG2E,
    NO_MASK,
    SPANS,
    masked_tile,
    probabilities,
    survives,
)
from gfsa.kernels.tile_access import load_tile, store_tile


@triton.jit
def _query_ranges(
    row, n, spans, last,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Queries ``clear … stop`` that see a whole block of keys, ``start … end`` to be masked.

    With spans the queries to be masked lie on both sides of the others, as in
    :func:`~gfsa.kernels.long.forward.key_ranges`: here a key whose document ends before
    ``clear`` is seen by none of the queries ``clear … stop``.

    Args:
        spans: first keys of all queries, then last queries of all keys.
        last: last queries of the block's keys.
    """
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
    return clear, stop, start, end


@triton.jit(**JIT_OPTIONS)
def grad_first_pass(
    q_cols, k_rows, g_cols, g_rows, v_rows, u_rows, out_rows, du_rows, delta_out, dc_out,
    lse_in, coeffs, mask, seed_in,
    heads, group, n, scale, mask_b, mask_h, mask_i, mask_j, dropout_p,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """``z = Aᵀ·g`` for BM keys, then dU, δ and the coefficients' gradients of these rows."""
    block = tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // heads
    h = bh % heads
    row = block * BM
    mask += b.to(tl.int64) * mask_b + h.to(tl.int64) * mask_h
    lse_in += bh.to(tl.int64) * n
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_in)
    j = row + tl.arange(0, BM)
    last = None
    if MASK == SPANS:
        # loaded while the copy engine brings the keys
        last = tl.load(mask + n + j, mask=j < n, other=-1)
    clear, stop, start, end = _query_ranges(row, n, mask, last, BM, BN, CAUSAL, MASK)
    k = load_tile(k_rows, b, h // group, row, BM, D)
    half_j = row // 2 + tl.arange(0, BM) // 2
    z = tl.zeros((BM, D), tl.float32)
    if MASK == SPANS:
        z = _grad_first_range(
            z, k, q_cols, g_cols, lse_in, mask, None, seed, b, h, bh, j, half_j, n,
            clear, stop, clear, stop, scale, mask_i, mask_j, dropout_p,
            D, BN, STAGES, CAUSAL, MASK, DROPOUT, False,
        )  # fmt: skip
        z = tl.where((last >= clear)[:, None], z, 0.0)
        last = last[:, None]
    z = _grad_first_range(
        z, k, q_cols, g_cols, lse_in, mask, last, seed, b, h, bh, j, half_j, n,
        start, end, clear, stop, scale, mask_i, mask_j, dropout_p,
        D, BN, STAGES, CAUSAL, MASK, DROPOUT, True,
    )  # fmt: skip
    if MASK != SPANS:
        z = _grad_first_range(
            z, k, q_cols, g_cols, lse_in, mask, last, seed, b, h, bh, j, half_j, n,
            clear, stop, clear, stop, scale, mask_i, mask_j, dropout_p,
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


@triton.jit
def _grad_first_range(
    z, k, q_cols, g_cols, lse_in, mask, last, seed, b, h, bh, j, half_j, n,
    start, end, clear, stop, scale, mask_i, mask_j, dropout_p,
    D: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BN)
    for step in tl.range(start, end, BN, num_stages=STAGES):
        col = step
        if MASKED and MASK == SPANS:
            col = masked_tile(step, clear, stop)
        i = col + columns
        half_i = col // 2 + columns // 2
        q = load_tile(q_cols, b, h, col, BN, D)
        lse = tl.load(lse_in + i, mask=i < n, other=float("inf")) * LOG2E
        s = tl.dot(k, tl.trans(q))
        p = probabilities(
            s, lse[None, :], i[None, :], j[:, None], n, mask, None, last, scale, mask_i, mask_j,
            CAUSAL, MASK, MASKED,
        )  # fmt: skip
        if DROPOUT:
            kept = survives(
                i[None, :], j[:, None], half_i[None, :], half_j[:, None], n, seed, bh, dropout_p
            )
            p = tl.where(kept, p, 0.0)
        g = load_tile(g_cols, b, h, col, BN, D)
        z = tl.dot(p.to(k.dtype), g, z)
    return z


@triton.jit(**JIT_OPTIONS)
def grad_keys(
    q_cols, k_rows, v_rows, u_rows, g_cols, g_rows, du_cols, dk_rows, dv_rows,
    delta_in, lse_in, coeffs, mask, seed_in,
    heads, group, n, scale, mask_b, mask_h, mask_i, mask_j, dropout_p,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """``dK = dSᵀ·Q·scale`` and ``dV = c0·g + Aᵀ·dU`` for BM keys of one query head."""
    block = tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // heads
    h = bh % heads
    row = block * BM
    mask += b.to(tl.int64) * mask_b + h.to(tl.int64) * mask_h
    lse_in += bh.to(tl.int64) * n
    delta_in += bh.to(tl.int64) * n
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_in)
    c0 = tl.load(coeffs + h * 3)
    c2 = tl.load(coeffs + h * 3 + 2)
    j = row + tl.arange(0, BM)
    last = None
    if MASK == SPANS:
        # loaded while the copy engine brings the keys
        last = tl.load(mask + n + j, mask=j < n, other=-1)
    clear, stop, start, end = _query_ranges(row, n, mask, last, BM, BN, CAUSAL, MASK)
    k = load_tile(k_rows, b, h // group, row, BM, D)
    v = load_tile(v_rows, b, h // group, row, BM, D)
    u = load_tile(u_rows, b, h, row, BM, D)
    u = (u.to(tl.float32) * c2).to(k.dtype)
    half_j = row // 2 + tl.arange(0, BM) // 2
    dk = tl.zeros((BM, D), tl.float32)
    dv = tl.zeros((BM, D), tl.float32)
    if MASK == SPANS:
        dk, dv = _grad_keys_range(
            dk, dv, k, v, u, q_cols, g_cols, du_cols, delta_in, lse_in, mask, None, seed, b, h, bh,
            j, half_j, n, clear, stop, clear, stop, scale, mask_i, mask_j, dropout_p,
            D, BN, STAGES, CAUSAL, MASK, DROPOUT, False,
        )  # fmt: skip
        seen = (last >= clear)[:, None]
        dk = tl.where(seen, dk, 0.0)
        dv = tl.where(seen, dv, 0.0)
        last = last[:, None]
    dk, dv = _grad_keys_range(
        dk, dv, k, v, u, q_cols, g_cols, du_cols, delta_in, lse_in, mask, last, seed, b, h, bh,
        j, half_j, n, start, end, clear, stop, scale, mask_i, mask_j, dropout_p,
        D, BN, STAGES, CAUSAL, MASK, DROPOUT, True,
    )  # fmt: skip
    if MASK != SPANS:
        dk, dv = _grad_keys_range(
            dk, dv, k, v, u, q_cols, g_cols, du_cols, delta_in, lse_in, mask, last, seed, b, h, bh,
            j, half_j, n, clear, stop, clear, stop, scale, mask_i, mask_j, dropout_p,
            D, BN, STAGES, CAUSAL, MASK, DROPOUT, False,
        )  # fmt: skip
    if DROPOUT:
        dv = dv / (1.0 - dropout_p)
    g = load_tile(g_rows, b, h, row, BM, D).to(tl.float32)
    store_tile(dk_rows, dk * scale, b, h, row, BM, D)
    store_tile(dv_rows, c0 * g + dv, b, h, row, BM, D)


@triton.jit
def _grad_keys_range(
    dk, dv, k, v, u, q_cols, g_cols, du_cols, delta_in, lse_in, mask, last, seed, b, h, bh, j,
    half_j, n, start, end, clear, stop, scale, mask_i, mask_j, dropout_p,
    D: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BN)
    for step in tl.range(start, end, BN, num_stages=STAGES):
        col = step
        if MASKED and MASK == SPANS:
            col = masked_tile(step, clear, stop)
        i = col + columns
        half_i = col // 2 + columns // 2
        q = load_tile(q_cols, b, h, col, BN, D)
        lse = tl.load(lse_in + i, mask=i < n, other=float("inf")) * LOG2E
        s = tl.dot(k, tl.trans(q))
        p = probabilities(
            s, lse[None, :], i[None, :], j[:, None], n, mask, None, last, scale, mask_i, mask_j,
            CAUSAL, MASK, MASKED,
        )  # fmt: skip
        du = load_tile(du_cols, b, h, col, BN, D)
        g = load_tile(g_cols, b, h, col, BN, D)
        da = tl.dot(u, tl.trans(g))
        da = tl.dot(v, tl.trans(du), da)
        if DROPOUT:
            kept = survives(
                i[None, :], j[:, None], half_i[None, :], half_j[:, None], n, seed, bh, dropout_p
            )
            da = tl.where(kept, da / (1.0 - dropout_p), 0.0)
            dv = tl.dot(tl.where(kept, p, 0.0).to(k.dtype), du, dv)
        else:
            dv = tl.dot(p.to(k.dtype), du, dv)
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
    c2 = tl.load(coeffs + h * 3 + 2)
    i = row + tl.arange(0, BM)
    first = None
    if MASK == SPANS:
        # loaded while the copy engine brings the queries
        first = tl.load(mask + i, mask=i < n, other=0)
    clear, stop, start, end = key_ranges(row, n, mask, first, BM, BN, CAUSAL, MASK)
    q = load_tile(q_rows, b, h, row, BM, D)
    g = load_tile(g_rows, b, h, row, BM, D)
    g = (g.to(tl.float32) * c2).to(q.dtype)
    du = load_tile(du_rows, b, h, row, BM, D)
    half_i = row // 2 + tl.arange(0, BM) // 2
    at = bh.to(tl.int64) * n + i
    lse = tl.load(lse_in + at, mask=i < n, other=float("inf")) * LOG2E
    delta = tl.load(delta_in + at, mask=i < n, other=0.0)
    dq = tl.zeros((BM, D), tl.float32)
    clear_lse = lse
    if MASK == SPANS:
        clear_lse = tl.where(first < stop, lse, float("inf"))
        first = first[:, None]
    dq = _grad_queries_range(
        dq, q, g, du, clear_lse, delta, k_cols, v_cols, u_cols, mask, first, seed, b, h, h // group,
        bh, i, half_i, n, clear, stop, clear, stop, scale, mask_i, mask_j, dropout_p,
        D, BN, STAGES, CAUSAL, MASK, DROPOUT, False,
    )  # fmt: skip
    dq = _grad_queries_range(
        dq, q, g, du, lse, delta, k_cols, v_cols, u_cols, mask, first, seed, b, h, h // group,
        bh, i, half_i, n, start, end, clear, stop, scale, mask_i, mask_j, dropout_p,
        D, BN, STAGES, CAUSAL, MASK, DROPOUT, True,
    )  # fmt: skip
    store_tile(dq_rows, dq * scale, b, h, row, BM, D)


@triton.jit
def _grad_queries_range(
    dq, q, g, du, lse, delta, k_cols, v_cols, u_cols, mask, first, seed, b, h, key_head, bh, i,
    half_i, n, start, end, clear, stop, scale, mask_i, mask_j, dropout_p,
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
        u = load_tile(u_cols, b, h, col, BN, D)
        v = load_tile(v_cols, b, key_head, col, BN, D)
        da = tl.dot(g, tl.trans(u))
        da = tl.dot(du, tl.trans(v), da)
        if DROPOUT:
            kept = survives(
                i[:, None], j[None, :], half_i[:, None], half_j[None, :], n, seed, bh, dropout_p
            )
            da = tl.where(kept, da / (1.0 - dropout_p), 0.0)
        ds = p * (da - delta[:, None])
        dq = tl.dot(ds.to(q.dtype), k, dq)
    return dq
