"""The kernel of :mod:`gfsa.operators.fused.decode`: one query head of one new token.

Several programs share the keys of a head, because one program would wait for its loads most of the
time. Each keeps its sums in float32; the last one to finish adds them up, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEP = tl.constexpr(8)
"""Strides of the cache are multiples of it, so that a thread reads 16 bytes at once."""


# lengths and strides change from token to token: nothing about them is compiled in
@triton.jit(
    do_not_specialize=[
        *("scale", "heads", "group", "last", "q_b", "q_h", "k_b", "k_h", "k_n"),
        *("v_b", "v_h", "v_n", "u_b", "u_h", "u_n", "mask_b", "mask_h", "mask_n"),
    ],
    do_not_specialize_on_alignment=["coeffs", "mask", "place", "arrived"],
)
def decode_token(
    q_in, k_in, v_in, u_in, coeffs, mask, place, y_out, u_out, sums, arrived,
    scale, heads, group, last, q_b, q_h, k_b, k_h, k_n, v_b, v_h, v_n, u_b, u_h, u_n,
    mask_b, mask_h, mask_n,
    D: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr,
    ON_DEVICE: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One query head of one sequence: y and u, rows of ``D`` numbers.

    Strides of k, v and u are counted in :data:`STEP` numbers.

    Args:
        sums: room for ``(programs, SPLITS, 2·WIDTH + 3)`` numbers, float32.
        arrived: for each head how many programs are done, int32; zero before and after.
    """
    # 64 bits: a cache may have more than 2³¹ numbers
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < D
    new = tl.load(place).to(tl.int32) if ON_DEVICE else last
    q = tl.load(q_in + b * q_b + h * q_h + column, mask=inside, other=0.0).to(tl.float32) * scale
    k_rows = k_in + (b * k_b + (h // group) * k_h) * STEP
    v_rows = v_in + (b * v_b + (h // group) * v_h) * STEP
    u_rows = u_in + (b * u_b + h * u_h) * STEP
    # from row to row
    k_step = k_n.to(tl.int64) * STEP
    v_step = v_n.to(tl.int64) * STEP
    u_step = u_n.to(tl.int64) * STEP
    # the largest score, the sum of weights, the new token's weight, and both sums of rows
    top = -float("inf")
    total = 0.0
    own = 0.0
    u = tl.zeros([WIDTH], tl.float32)
    w = tl.zeros([WIDTH], tl.float32)
    # whole tiles for each program, so that none is read twice
    tiles = tl.cdiv(tl.cdiv(new + 1, BN), SPLITS)
    begin = tl.program_id(1) * tiles * BN
    for start in tl.range(begin, tl.minimum(begin + tiles * BN, new + 1), BN, num_stages=STAGES):
        row = (start + tl.arange(0, BN)).to(tl.int64)
        seen = row <= new
        some = seen[:, None] & inside[None, :]
        k = tl.load(k_rows + row[:, None] * k_step + column[None, :], mask=some, other=0.0)
        v = tl.load(v_rows + row[:, None] * v_step + column[None, :], mask=some, other=0.0)
        cached = (row < new)[:, None] & inside[None, :]
        other = tl.load(u_rows + row[:, None] * u_step + column[None, :], mask=cached, other=0.0)
        score = tl.sum(k.to(tl.float32) * q[None, :], 1)
        if MASK:
            seen = seen & (tl.load(mask + b * mask_b + h * mask_h + row * mask_n, seen, 0) != 0)
        score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 0))
        # while nothing has been seen, -inf - (-inf) would be NaN
        base = tl.where(higher == -float("inf"), 0.0, higher)
        shrink = tl.exp(top - base)
        p = tl.exp(score - base)
        past = tl.where(row < new, p, 0.0)
        total = total * shrink + tl.sum(p, 0)
        own = own * shrink + tl.sum(p - past, 0)
        u = u * shrink + tl.sum(p[:, None] * v.to(tl.float32), 0)
        w = w * shrink + tl.sum(past[:, None] * other.to(tl.float32), 0)
        top = higher
    newest = v_rows + new.to(tl.int64) * v_step
    v = tl.load(newest + column, mask=inside, other=0.0).to(tl.float32)
    coeffs += h * 3
    if SPLITS == 1:
        _finish(u, w, total, own, v, coeffs, y_out, u_out, D, WIDTH)
    else:
        head = tl.program_id(0)
        sums += head.to(tl.int64) * (SPLITS * (2 * WIDTH + 3))
        part = sums + tl.program_id(1) * (2 * WIDTH + 3)
        tl.store(part + column, u)
        tl.store(part + WIDTH + column, w)
        tl.store(part + 2 * WIDTH, top)
        tl.store(part + 2 * WIDTH + 1, total)
        tl.store(part + 2 * WIDTH + 2, own)
        # all threads have written before the first one says so
        tl.debug_barrier()
        if tl.atomic_add(arrived + head, 1, sem="acq_rel") == SPLITS - 1:
            # for the next launch
            tl.store(arrived + head, 0)
            split = tl.arange(0, SPLITS)
            parts = sums + split * (2 * WIDTH + 3)
            tops = tl.load(parts + 2 * WIDTH, cache_modifier=".cg")
            totals = tl.load(parts + 2 * WIDTH + 1, cache_modifier=".cg")
            owns = tl.load(parts + 2 * WIDTH + 2, cache_modifier=".cg")
            rows = parts[:, None] + column[None, :]
            us = tl.load(rows, cache_modifier=".cg")
            ws = tl.load(rows + WIDTH, cache_modifier=".cg")
            highest = tl.max(tops, 0)
            base = tl.where(highest == -float("inf"), 0.0, highest)
            weight = tl.exp(tops - base)
            u = tl.sum(us * weight[:, None], 0)
            w = tl.sum(ws * weight[:, None], 0)
            total = tl.sum(totals * weight, 0)
            own = tl.sum(owns * weight, 0)
            _finish(u, w, total, own, v, coeffs, y_out, u_out, D, WIDTH)


@triton.jit
def _finish(u, w, total, own, v, coeffs, y_out, u_out, D: tl.constexpr, WIDTH: tl.constexpr):
    """``u = Σ p·v`` and ``y = c0·v + c1·u + c2·(w + p_new·u)`` from plain sums of weights."""
    column = tl.arange(0, WIDTH)
    inside = column < D
    # a token that sees nothing has a row of zeros
    share = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    # rounded as it is cached: later tokens see it so
    u = (u * share).to(u_out.dtype.element_ty)
    c0 = tl.load(coeffs)
    c1 = tl.load(coeffs + 1)
    c2 = tl.load(coeffs + 2)
    second = w * share + own * share * u.to(tl.float32)
    y = c0 * v + c1 * u.to(tl.float32) + c2 * second
    out = tl.program_id(0).to(tl.int64) * D + column
    tl.store(u_out + out, u, mask=inside)
    tl.store(y_out + out, y.to(y_out.dtype.element_ty), mask=inside)
