"""The forward kernel of degree 1 in one pass: ``out = c0·V + c1·A·V``; its gradient is Hopper's.

``A·V`` is neither written nor saved: what the filter adds is on chip already. In tensors of V's
size the kernel moves 4, as attention does; around torch's attention the same filter moves more
(``degree_one.py``).

Logsumexps are to base 2. Each head has a multiple of 16 of them, so that the copy engine can read
them; queries beyond the last one have an infinite logsumexp. Scales are positive.

A program's own rows are read by their addresses, ``…_in`` with strides, and a row of UNITS times 16
bytes: the copy engine's loads outside of a loop would wait for one another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfsa.kernels.long.tiles import LOG2E
from gfsa.kernels.tile_access import load_tile, store_tile

JIT_OPTIONS = {
    "do_not_specialize": [
        *(f"{tensor}_{axis}" for tensor in "qv" for axis in "bhn"),
        *("heads", "blocks", "total", "together", "zero"),
    ],
    "do_not_specialize_on_alignment": ["coeffs"],
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
def _key_ranges(row, n, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """Keys ``0 … clear`` that a block of queries sees in full, ``clear … end`` to be masked."""
    end = n
    clear = n // BN * BN
    if CAUSAL:
        end = tl.minimum(n, row + BM)
        clear = row // BN * BN
    return clear, end


@triton.jit(**JIT_OPTIONS)
def attend_once(
    k_cols, v_cols, out_rows, q_in, v_in, lse_out, coeffs,
    q_b, q_h, q_n, v_b, v_h, v_n,
    heads, group, n, scale, blocks, total, together, zero,
    UNITS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    POWERS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """``out = c0·V + c1·A·V`` and the logsumexp of the scores, for BM queries."""
    block, bh = _own_block(blocks, total, together, CAUSAL)
    b, h = bh // heads, bh % heads
    key_head = h // group
    row = block * BM
    q = load_tile((q_in, q_b, q_h, q_n, n, UNITS), b, h, row, BM, D)
    i = row + tl.arange(0, BM)
    top = tl.full((BM,), float("-inf"), tl.float32)
    norm = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    clear, end = _key_ranges(row, n, BM, BN, CAUSAL)
    top, norm, acc = _attend_range(
        top, norm, acc, q, k_cols, v_cols, b, key_head, i, n, 0, clear,
        scale, D, BN, STAGES, CAUSAL, False,
    )  # fmt: skip
    top, norm, acc = _attend_range(
        top, norm, acc, q, k_cols, v_cols, b, key_head, i, n, clear, end,
        scale, D, BN, STAGES, CAUSAL, True,
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
    top, norm, acc, q, k_cols, v_cols, b, key_head, i, n, start, end,
    scale, D: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BN)
    sc = scale * LOG2E
    for col in tl.range(start, end, BN, num_stages=STAGES):
        k = load_tile(k_cols, b, key_head, col, BN, D)
        s = tl.dot(q, tl.trans(k))
        if MASKED:
            j = col + columns
            keep = (j < n)[None, :]
            if CAUSAL:
                keep = keep & (j[None, :] <= i[:, None])
            s = tl.where(keep, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1) * sc)
        p = tl.exp2(s * sc - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        norm = norm * shrink + tl.sum(p, 1)
        v = load_tile(v_cols, b, key_head, col, BN, D)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    return top, norm, acc
