r"""Forward kernel: ``U = A·V`` and ``out = c0·V + c1·U + c2·A·U`` in one sweep under a causal mask.

.. math::
    P = \exp(S_{ij} - m), \qquad O_1 \leftarrow O_1 + P V_j, \qquad
    O_2 \leftarrow O_2 + P U_j \quad (j < i), \\
    U_i = O_1 / l, \qquad O_2 \leftarrow O_2 + P_{ii} U_i, \qquad
    out_i = c_0 V_i + c_1 U_i + c_2 O_2 / l .

The tile on the diagonal comes last; its probabilities stay in registers until ``U_i`` is known.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfsa.operators.fused.causal.wavefront import LIGHT, publish, take_ticket, wait_for
from gfsa.operators.fused.tiles import LOG2E, load_tile, store_tile


@triton.jit(**LIGHT)
def filter_rows(
    q_rows, k_cols, v_cols, k_rows, v_rows, out_rows,
    u, lse_out, coeffs, progress,
    heads, group, n, scale, u_b, u_h, u_i, total,
    D: tl.constexpr, HEAD_DIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, WAVE: tl.constexpr,
):  # fmt: skip
    """BM queries a block.

    WAVE: a program takes one block and waits for the blocks before it; ``progress`` holds the rows
    of U that are ready, a number a head, then the counter of tickets. Otherwise a program takes all
    blocks of a head, in order.
    """
    if WAVE:
        ticket = take_ticket(progress + total)
        # the blocks of low rows first, of all heads
        _row_block(
            ticket % total, ticket // total * BM,
            q_rows, k_cols, v_cols, k_rows, v_rows, out_rows, u, lse_out, coeffs, progress,
            heads, group, n, scale, u_b, u_h, u_i, D, HEAD_DIM, BM, BN, STAGES, WAVE,
        )  # fmt: skip
    else:
        for row in range(0, n, BM):
            _row_block(
                tl.program_id(0), row,
                q_rows, k_cols, v_cols, k_rows, v_rows, out_rows, u, lse_out, coeffs, progress,
                heads, group, n, scale, u_b, u_h, u_i, D, HEAD_DIM, BM, BN, STAGES, WAVE,
            )  # fmt: skip


@triton.jit
def _row_block(
    bh, row, q_rows, k_cols, v_cols, k_rows, v_rows, out_rows, u, lse_out, coeffs, progress,
    heads, group, n, scale, u_b, u_h, u_i,
    D: tl.constexpr, HEAD_DIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, WAVE: tl.constexpr,
):  # fmt: skip
    b = bh // heads
    h = bh % heads
    key_head = h // group
    u += b.to(tl.int64) * u_b + h.to(tl.int64) * u_h
    sc = scale * LOG2E
    q = load_tile(q_rows, b, h, row, BM, D)
    top = tl.full((BM,), float("-inf"), tl.float32)
    norm = tl.zeros((BM,), tl.float32)
    once = tl.zeros((BM, D), tl.float32)
    twice = tl.zeros((BM, D), tl.float32)
    if WAVE:
        done = 0
        while done < row:
            end = tl.minimum(wait_for(progress + bh, done + 1), row)
            top, norm, once, twice = _columns(
                top, norm, once, twice, q, k_cols, v_cols, u, b, key_head, done, end, sc, u_i,
                D, HEAD_DIM, BN, STAGES,
            )  # fmt: skip
            done = end
    else:
        top, norm, once, twice = _columns(
            top, norm, once, twice, q, k_cols, v_cols, u, b, key_head, 0, row, sc, u_i,
            D, HEAD_DIM, BN, STAGES,
        )  # fmt: skip
    i = row + tl.arange(0, BM)
    k = load_tile(k_rows, b, key_head, row, BM, D)
    s = tl.dot(q, tl.trans(k))
    s = tl.where(tl.arange(0, BM)[:, None] >= tl.arange(0, BM)[None, :], s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1) * sc)
    p = tl.exp2(s * sc - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    norm = norm * shrink + tl.sum(p, 1)
    p = p.to(q.dtype)
    v = load_tile(v_rows, b, key_head, row, BM, D)
    once = tl.dot(p, v, once * shrink[:, None])
    inverse = 1.0 / norm
    here = (once * inverse[:, None]).to(q.dtype)
    d = tl.arange(0, D)
    at = i.to(tl.int64)[:, None] * u_i + d[None, :]
    tl.store(u + at, here, mask=(i < n)[:, None] & (d < HEAD_DIM)[None, :])
    if WAVE:
        publish(progress + bh, row + BM)
    else:
        # the program's own later blocks read it
        tl.debug_barrier()
    twice = tl.dot(p, here, twice * shrink[:, None])
    c0 = tl.load(coeffs + h * 3)
    c1 = tl.load(coeffs + h * 3 + 1)
    c2 = tl.load(coeffs + h * 3 + 2)
    # loaded again: registers are short while both sums are in them
    v = load_tile(v_rows, b, key_head, row, BM, D)
    out = c0 * v.to(tl.float32) + c1 * here.to(tl.float32) + twice * (c2 * inverse)[:, None]
    store_tile(out_rows, out, b, h, row, BM, D)
    lse = (new_top + tl.log2(norm)) / LOG2E
    tl.store(lse_out + bh.to(tl.int64) * n + i, lse, mask=i < n)


@triton.jit
def _columns(
    top, norm, once, twice, q, k_cols, v_cols, u, b, key_head, start, end, sc, u_i,
    D: tl.constexpr, HEAD_DIM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keys ``start … end``, which every query of the block sees and whose U is ready."""
    d = tl.arange(0, D)
    for col in tl.range(start, end, BN, num_stages=STAGES):
        k = load_tile(k_cols, b, key_head, col, BN, D)
        s = tl.dot(q, tl.trans(k))
        new_top = tl.maximum(top, tl.max(s, 1) * sc)
        p = tl.exp2(s * sc - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        norm = norm * shrink + tl.sum(p, 1)
        p = p.to(q.dtype)
        v = load_tile(v_cols, b, key_head, col, BN, D)
        once = tl.dot(p, v, once * shrink[:, None])
        j = col + tl.arange(0, BN)
        at = u + (j.to(tl.int64)[:, None] * u_i + d[None, :])
        if HEAD_DIM == D:
            here = tl.load(at)
        else:
            here = tl.load(at, mask=(d < HEAD_DIM)[None, :], other=0.0)
        twice = tl.dot(p, here, twice * shrink[:, None])
        top = new_top
    return top, norm, once, twice
