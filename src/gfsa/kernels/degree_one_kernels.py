r"""Kernels of a filter of degree 1 in one pass: ``out = c0·V + c1·A·V`` and its gradient.

With g the output's gradient and z = Aᵀ·g:

.. math::
    dV = c_0 g + c_1 z, \qquad dS = A \circ (c_1\,g V^\top - \delta), \qquad
    \delta_i = \langle g, out\rangle_i - c_0 \langle g, V\rangle_i, \\
    dc_0 = \sum \langle g, V\rangle, \qquad dc_1 = \sum \langle z, V\rangle .

``A·V`` is neither written nor saved, g is used as it comes, and nothing is divided by c1. In
tensors of V's size the forward moves 4, as attention does, and the gradient 12 (dQ: 5 in, 1 out;
dK and dV: 4 in, 2 out): what the filter adds is on chip already. Around torch's attention the same
filter moves 11 more than attention does (``degree_one.py``).

The gradient takes one kernel for dQ and one for dK and dV, each of which makes the scores and
``g·Vᵀ`` again: with the forward's two, nine matrix products, where attention with a sum of dQ in
memory takes seven.

Logsumexps are to base 2. They and δ have a multiple of 16 numbers a head, so that the copy engine
can read them; queries beyond the last one have an infinite logsumexp. Scales are positive.

A program's own rows are read by their addresses, ``…_in`` with strides, and a row of UNITS times 16
bytes: the copy engine's loads outside of a loop would wait for one another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfsa.kernels.long.tiles import KEY_MASK, LOG2E, NO_MASK
from gfsa.kernels.tile_access import load_numbers, load_tile, store_tile

JIT_OPTIONS = {
    "do_not_specialize": [
        *(f"{tensor}_{axis}" for tensor in ("q", "k", "v", "g", "out") for axis in "bhn"),
        *("heads", "blocks", "total", "together", "zero", "mask_b", "mask_j"),
    ],
    "do_not_specialize_on_alignment": ["coeffs", "mask"],
}


@triton.jit
def _own_block(blocks, total, together, LAST_FIRST: tl.constexpr):
    """This program's block of rows and its head of all ``total`` heads of the batch.

    Heads go ``together`` at a time through the same block, so that the longest blocks of a causal
    call run first and the shortest ones fill the gaps at the end.
    """
    program = tl.program_id(0)
    first = program // (blocks * together) * together
    width = tl.minimum(together, total - first)
    rest = program - first * blocks
    block = rest // width
    if LAST_FIRST:
        block = blocks - 1 - block
    return block, first + rest % width


@triton.jit
def _sees(i, j, n, mask, mask_j, CAUSAL: tl.constexpr, MASK: tl.constexpr):
    """Whether query ``i`` sees key ``j``; the two indices broadcast, in either orientation."""
    keep = j < n
    if CAUSAL:
        keep = keep & (j <= i)
    if MASK == KEY_MASK:
        # the stride is the caller's: the last key may lie 2³¹ or more behind the first
        at = j.to(tl.int64) * mask_j
        keep = keep & (tl.load(mask + at, mask=j < n, other=0) != 0)
    return keep


@triton.jit
def _key_ranges(
    row, n, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr
):
    """Keys ``0 … clear`` that a block of queries sees in full, ``clear … end`` to be masked."""
    end = n
    clear = n // BN * BN
    if CAUSAL:
        end = tl.minimum(n, row + BM)
        clear = row // BN * BN
    if MASK != NO_MASK:
        clear = 0
    return clear, end


@triton.jit
def _query_ranges(
    row, n, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr
):
    """Queries ``start … clear`` to be masked for a block of keys; the others see all of it."""
    start = 0
    clear = 0
    if CAUSAL:
        start = row // BN * BN
        clear = tl.minimum(tl.cdiv(row + BM, BN) * BN, n)
    if MASK != NO_MASK:
        clear = n
    return start, clear


@triton.jit(**JIT_OPTIONS)
def attend_once(
    k_cols, v_cols, out_rows, q_in, v_in, lse_out, coeffs, mask,
    q_b, q_h, q_n, v_b, v_h, v_n,
    heads, group, n, scale, blocks, total, together, zero, mask_b, mask_j,
    UNITS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    POWERS: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """``out = c0·V + c1·A·V`` and the logsumexp of the scores, for BM queries."""
    block, bh = _own_block(blocks, total, together, CAUSAL)
    b, h = bh // heads, bh % heads
    key_head = h // group
    row = block * BM
    mask += b.to(tl.int64) * mask_b
    q = load_tile((q_in, q_b, q_h, q_n, n, UNITS), b, h, row, BM, D)
    i = row + tl.arange(0, BM)
    top = tl.full((BM,), float("-inf"), tl.float32)
    norm = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    clear, end = _key_ranges(row, n, BM, BN, CAUSAL, MASK)
    top, norm, acc = _attend_range(
        top, norm, acc, q, k_cols, v_cols, mask, b, key_head, i, n, 0, clear,
        scale, mask_j, D, BN, STAGES, CAUSAL, MASK, False,
    )  # fmt: skip
    top, norm, acc = _attend_range(
        top, norm, acc, q, k_cols, v_cols, mask, b, key_head, i, n, clear, end,
        scale, mask_j, D, BN, STAGES, CAUSAL, MASK, True,
    )  # fmt: skip
    # a row without keys: its map is zero, and an infinite logsumexp makes it so in the gradient
    empty = (norm == 0.0) | (i >= n)
    norm = tl.where(empty, 1.0, norm)
    lse = tl.where(empty, float("inf"), top + tl.log2(norm))
    length = (n + 15) // 16 * 16
    tl.store(lse_out + bh.to(tl.int64) * length + i, lse, mask=i < length)
    c0 = tl.load(coeffs + h * POWERS)
    c1 = tl.load(coeffs + h * POWERS + 1)
    # computed anew behind a zero that the compiler does not know: addresses that it recognised
    # would occupy registers in the loop
    row += zero
    v = load_tile((v_in, v_b, v_h, v_n, n, UNITS), b, key_head, row, BM, D).to(tl.float32)
    store_tile(out_rows, c0 * v + acc * (c1 / norm)[:, None], b, h, row, BM, D)


@triton.jit
def _attend_range(
    top, norm, acc, q, k_cols, v_cols, mask, b, key_head, i, n, start, end,
    scale, mask_j, D: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BN)
    sc = scale * LOG2E
    for col in tl.range(start, end, BN, num_stages=STAGES):
        k = load_tile(k_cols, b, key_head, col, BN, D)
        s = tl.dot(q, tl.trans(k))
        if MASKED:
            j = col + columns
            keep = _sees(i[:, None], j[None, :], n, mask, mask_j, CAUSAL, MASK)
            s = tl.where(keep, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1) * sc)
        shift = new_top
        if MASK != NO_MASK:
            # −inf minus −inf is NaN
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s * sc - shift[:, None])
        shrink = tl.exp2(top - shift)
        norm = norm * shrink + tl.sum(p, 1)
        v = load_tile(v_cols, b, key_head, col, BN, D)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    return top, norm, acc


@triton.jit(**JIT_OPTIONS)
def grad_queries_once(
    k_cols, v_cols, dq_rows, q_in, v_in, g_in, out_in, lse_in, delta_out, coeffs, mask,
    q_b, q_h, q_n, v_b, v_h, v_n, g_b, g_h, g_n, out_b, out_h, out_n,
    heads, group, n, scale, blocks, total, together, zero, mask_b, mask_j,
    UNITS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    POWERS: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """``dQ = dS·K·scale`` for BM queries, and their δ for the gradients of the keys."""
    block, bh = _own_block(blocks, total, together, CAUSAL)
    b, h = bh // heads, bh % heads
    key_head = h // group
    row = block * BM
    mask += b.to(tl.int64) * mask_b
    c0 = tl.load(coeffs + h * POWERS)
    c1 = tl.load(coeffs + h * POWERS + 1)
    i = row + tl.arange(0, BM)
    length = (n + 15) // 16 * 16
    at = bh.to(tl.int64) * length + i
    lse = tl.load(lse_in + at, mask=i < length, other=float("inf"))
    q = load_tile((q_in, q_b, q_h, q_n, n, UNITS), b, h, row, BM, D)
    g = load_tile((g_in, g_b, g_h, g_n, n, UNITS), b, h, row, BM, D)
    out = load_tile((out_in, out_b, out_h, out_n, n, UNITS), b, h, row, BM, D).to(tl.float32)
    v = load_tile((v_in, v_b, v_h, v_n, n, UNITS), b, key_head, row, BM, D).to(tl.float32)
    delta = tl.sum(g.to(tl.float32) * (out - c0 * v), 1)
    tl.store(delta_out + at, delta, mask=i < length)
    dq = tl.zeros((BM, D), tl.float32)
    clear, end = _key_ranges(row, n, BM, BN, CAUSAL, MASK)
    dq = _grad_queries_range(
        dq, q, g, lse, delta, c1, k_cols, v_cols, mask, b, key_head, i, n, 0, clear,
        scale, mask_j, D, BN, STAGES, CAUSAL, MASK, False,
    )  # fmt: skip
    dq = _grad_queries_range(
        dq, q, g, lse, delta, c1, k_cols, v_cols, mask, b, key_head, i, n, clear, end,
        scale, mask_j, D, BN, STAGES, CAUSAL, MASK, True,
    )  # fmt: skip
    store_tile(dq_rows, dq * scale, b, h, row, BM, D)


@triton.jit
def _grad_queries_range(
    dq, q, g, lse, delta, c1, k_cols, v_cols, mask, b, key_head, i, n, start, end,
    scale, mask_j, D: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BN)
    sc = scale * LOG2E
    for col in tl.range(start, end, BN, num_stages=STAGES):
        k = load_tile(k_cols, b, key_head, col, BN, D)
        s = tl.dot(q, tl.trans(k))
        v = load_tile(v_cols, b, key_head, col, BN, D)
        da = tl.dot(g, tl.trans(v))
        p = tl.exp2(s * sc - lse[:, None])
        if MASKED:
            j = col + columns
            keep = _sees(i[:, None], j[None, :], n, mask, mask_j, CAUSAL, MASK)
            p = tl.where(keep, p, 0.0)
        ds = p * (c1 * da - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit(**JIT_OPTIONS)
def grad_keys_once(
    q_cols, g_cols, lse_cols, delta_cols, dk_rows, dv_rows, k_in, v_in, g_in, dc_out, coeffs, mask,
    k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n,
    heads, group, n, scale, blocks, total, together, zero, mask_b, mask_j,
    UNITS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    POWERS: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """dK, dV and the coefficients' gradients of BM keys, for one query head."""
    block, bh = _own_block(blocks, total, together, False)
    b, h = bh // heads, bh % heads
    key_head = h // group
    row = block * BM
    mask += b.to(tl.int64) * mask_b
    c0 = tl.load(coeffs + h * POWERS)
    c1 = tl.load(coeffs + h * POWERS + 1)
    k = load_tile((k_in, k_b, k_h, k_n, n, UNITS), b, key_head, row, BM, D)
    v = load_tile((v_in, v_b, v_h, v_n, n, UNITS), b, key_head, row, BM, D)
    j = row + tl.arange(0, BM)
    dk = tl.zeros((BM, D), tl.float32)
    z = tl.zeros((BM, D), tl.float32)
    start, clear = _query_ranges(row, n, BM, BN, CAUSAL, MASK)
    dk, z = _grad_keys_range(
        dk, z, k, v, q_cols, g_cols, lse_cols, delta_cols, c1, mask, b, h, j, n, start, clear,
        scale, mask_j, D, BN, STAGES, CAUSAL, MASK, True,
    )  # fmt: skip
    dk, z = _grad_keys_range(
        dk, z, k, v, q_cols, g_cols, lse_cols, delta_cols, c1, mask, b, h, j, n, clear, n,
        scale, mask_j, D, BN, STAGES, CAUSAL, MASK, False,
    )  # fmt: skip
    # rows beyond the last key hold arbitrary numbers, infinities included
    z = tl.where(j[:, None] < n, z, 0.0)
    # as in the forward: rows and addresses of their own
    row += zero
    v = load_tile((v_in, v_b, v_h, v_n, n, UNITS), b, key_head, row, BM, D).to(tl.float32)
    g = load_tile((g_in, g_b, g_h, g_n, n, UNITS), b, h, row, BM, D).to(tl.float32)
    # (H, 2, B·blocks): what is added up is contiguous
    parts = total // heads * blocks
    dc = dc_out + h * 2 * parts + b * blocks + block
    tl.store(dc, tl.sum(tl.sum(g * v, 1), 0))
    # both axes at once, as in grad_first_pass
    tl.store(dc + parts, tl.sum(z * v))
    store_tile(dv_rows, c0 * g + c1 * z, b, h, row, BM, D)
    store_tile(dk_rows, dk * scale, b, h, row, BM, D)


@triton.jit
def _grad_keys_range(
    dk, z, k, v, q_cols, g_cols, lse_cols, delta_cols, c1, mask, b, h, j, n, start, end,
    scale, mask_j, D: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BN)
    sc = scale * LOG2E
    for col in tl.range(start, end, BN, num_stages=STAGES):
        q = load_tile(q_cols, b, h, col, BN, D)
        s = tl.dot(k, tl.trans(q))
        g = load_tile(g_cols, b, h, col, BN, D)
        da = tl.dot(v, tl.trans(g))
        lse = load_numbers(lse_cols, b, h, col, BN)
        p = tl.exp2(s * sc - lse[None, :])
        if MASKED:
            i = col + columns
            keep = _sees(i[None, :], j[:, None], n, mask, mask_j, CAUSAL, MASK)
            p = tl.where(keep, p, 0.0)
        z = tl.dot(p.to(g.dtype), g, z)
        delta = load_numbers(delta_cols, b, h, col, BN)
        ds = p * (c1 * da - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, z
