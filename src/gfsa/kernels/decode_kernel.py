r"""The kernel of :mod:`gfsa.kernels.decode`: one query head of one new token.

Several programs share the keys of a head, because one program would wait for its loads most of the
time. Each keeps its sums in float32; the last one to finish adds them up, always in the same order.

Inside of a program each row of a tile has a running maximum and sums of its own, so that nothing is
exchanged between threads while tiles are read, except to add up a score. The rows are added up
after the last tile, by the same formula as programs are:

.. math:: \Sigma = \sum_r 2^{t_r - t}\,\Sigma_r, \qquad t = \max_r t_r

With degree 1 there is no U, and what belongs to it is left out when the kernel is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEP = tl.constexpr(8)
"""Strides of the cache are multiples of it, so that a thread reads 16 bytes at once."""
LOG2_E = tl.constexpr(1.4426950408889634)


# lengths and strides change from token to token: nothing about them is compiled in
@triton.jit(
    do_not_specialize=[
        *("scale", "heads", "group", "last", "q_b", "q_h", "k_b", "k_h", "k_n"),
        *("v_b", "v_h", "v_n", "u_b", "u_h", "u_n", "mask_b", "mask_h", "mask_n"),
    ],
    do_not_specialize_on_alignment=[
        *("theta", "base", "basis", "mask", "length", "arrived"),
    ],
)
def decode_token(
    q_in, k_in, v_in, u_rows, theta, base, basis, mask, length, y_out, sums, arrived,
    scale, heads, group, last, q_b, q_h, k_b, k_h, k_n, v_b, v_h, v_n, u_b, u_h, u_n,
    mask_b, mask_h, mask_n,
    D: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, LEARNED: tl.constexpr,
    BY_HEAD: tl.constexpr, MASK: tl.constexpr, ON_DEVICE: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, DEGREE: tl.constexpr,
):  # fmt: skip
    """One query head of one sequence: its row of y, and with degree 2 its row of U in the cache.

    Strides of k, v and u are counted in :data:`STEP` numbers.

    Args:
        u_rows: read and written with degree 2 alone.
        theta, base, basis: see :func:`_coefficients`.
        length: with ``ON_DEVICE``, how many tokens there are, the new one included.
        sums: room for ``(programs, SPLITS, DEGREE·WIDTH + DEGREE + 1)`` numbers, float32.
        arrived: for each head how many programs are done, int32; zero before and after.
    """
    # 64 bits: a cache may have more than 2³¹ numbers
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < D
    new = tl.load(length).to(tl.int32) - 1 if ON_DEVICE else last
    q = tl.load(q_in + b * q_b + h * q_h + column, mask=inside, other=0.0).to(tl.float32)
    q = q * (scale * LOG2_E)
    k_in += (b * k_b + (h // group) * k_h) * STEP
    v_in += (b * v_b + (h // group) * v_h) * STEP
    u_rows += (b * u_b + h * u_h) * STEP
    # loaded before the loop: at the end the program that finishes a head would wait for them
    c = _coefficients(theta, base, basis, h, LEARNED, BY_HEAD, DEGREE)
    # from row to row
    k_step = k_n.to(tl.int64) * STEP
    v_step = v_n.to(tl.int64) * STEP
    u_step = u_n.to(tl.int64) * STEP
    # of each row of a tile: the largest score, the sum of weights, the new token's weight, and
    # both sums of rows; with degree 1 nothing reads own and w, and the compiler drops them
    top = tl.full([BN], -float("inf"), tl.float32)
    total = tl.zeros([BN], tl.float32)
    own = tl.zeros([BN], tl.float32)
    u = tl.zeros([BN, WIDTH], tl.float32)
    w = tl.zeros([BN, WIDTH], tl.float32)
    # whole tiles for each program, so that none is read twice; of the tokens that there are, not of
    # the rows that there is room for: all programs work, and the time follows the length
    tiles = tl.cdiv(tl.cdiv(new + 1, BN), SPLITS)
    begin = tl.program_id(1) * tiles * BN
    newest = v_in + new.to(tl.int64) * v_step
    u_out = u_rows + new.to(tl.int64) * u_step
    own_v = tl.load(newest + column, mask=inside, other=0.0).to(tl.float32)
    if MASK:
        mask += b * mask_b + h * mask_h
        first = begin + tl.arange(0, BN)
        ahead = tl.load(mask + first.to(tl.int64) * mask_n, first <= new, 0)
    for start in tl.range(begin, tl.minimum(begin + tiles * BN, new + 1), BN, num_stages=STAGES):
        row = (start + tl.arange(0, BN)).to(tl.int64)
        seen = row <= new
        some = seen[:, None] & inside[None, :]
        k = tl.load(k_in + row[:, None] * k_step + column[None, :], mask=some, other=0.0)
        v = tl.load(v_in + row[:, None] * v_step + column[None, :], mask=some, other=0.0)
        if DEGREE == 2:
            # the new token's row of U is written below
            cached = (row < new)[:, None] & inside[None, :]
            past_u = u_rows + row[:, None] * u_step + column[None, :]
            other = tl.load(past_u, mask=cached, other=0.0)
        score = tl.sum(k.to(tl.float32) * q[None, :], 1)
        if MASK:
            seen = seen & (ahead != 0)
            # the compiler does not pipeline loads this narrow, so the next mask is prefetched here
            ahead = tl.load(mask + (row + BN) * mask_n, row + BN <= new, 0)
        score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(top, score)
        shift = _finite(higher)
        shrink = tl.exp2(top - shift)
        p = tl.exp2(score - shift)
        past = tl.where(row < new, p, 0.0)
        total = total * shrink + p
        own = own * shrink + (p - past)
        u = u * shrink[:, None] + p[:, None] * v.to(tl.float32)
        if DEGREE == 2:
            w = w * shrink[:, None] + past[:, None] * other.to(tl.float32)
        top = higher
    highest = tl.max(top, 0)
    weight = tl.exp2(top - _finite(highest))
    u, w, total, own = _together(weight, u, w, total, own, DEGREE)
    if SPLITS == 1:
        _finish(u, w, total, own, own_v, c, y_out, u_out, D, WIDTH, DEGREE)
    else:
        # of one program: u, with degree 2 also w, then the numbers
        ROWS: tl.constexpr = DEGREE * WIDTH
        PART: tl.constexpr = ROWS + DEGREE + 1
        head = tl.program_id(0)
        sums += head.to(tl.int64) * (SPLITS * PART)
        part = sums + tl.program_id(1) * PART
        tl.store(part + column, u)
        if DEGREE == 2:
            tl.store(part + WIDTH + column, w)
        tl.store(part + ROWS, highest)
        tl.store(part + ROWS + 1, total)
        if DEGREE == 2:
            tl.store(part + ROWS + 2, own)
        # all threads have written before the first one says so
        tl.debug_barrier()
        if tl.atomic_add(arrived + head, 1, sem="acq_rel") == SPLITS - 1:
            # for the next launch
            tl.store(arrived + head, 0)
            parts = sums + tl.arange(0, SPLITS) * PART
            tops = tl.load(parts + ROWS, cache_modifier=".cg")
            totals = tl.load(parts + ROWS + 1, cache_modifier=".cg")
            owns, ws = own, w
            if DEGREE == 2:
                owns = tl.load(parts + ROWS + 2, cache_modifier=".cg")
            rows = parts[:, None] + column[None, :]
            us = tl.load(rows, cache_modifier=".cg")
            if DEGREE == 2:
                ws = tl.load(rows + WIDTH, cache_modifier=".cg")
            weights = tl.exp2(tops - _finite(tl.max(tops, 0)))
            u, w, total, own = _together(weights, us, ws, totals, owns, DEGREE)
            _finish(u, w, total, own, own_v, c, y_out, u_out, D, WIDTH, DEGREE)


@triton.jit
def _finite(top):
    """While nothing has been seen, -inf - (-inf) would be NaN."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def _together(weight, u, w, total, own, DEGREE: tl.constexpr):
    """Sums over the first axis, each entry weighted; with degree 1 of u and total alone."""
    if DEGREE == 2:
        # two sums per reduction: half as many barriers between the warps
        u, w = tl.split(tl.sum(tl.join(u * weight[:, None], w * weight[:, None]), 0))
        total, own = tl.split(tl.sum(tl.join(total * weight, own * weight), 0))
    else:
        u = tl.sum(u * weight[:, None], 0)
        total = tl.sum(total * weight, 0)
    return u, w, total, own


@triton.jit
def _finish(
    u, w, total, own, v, c, y_out, u_out, D: tl.constexpr, WIDTH: tl.constexpr,
    DEGREE: tl.constexpr,
):  # fmt: skip
    """``u = Σ p·v`` and ``y = c0·v + c1·u + c2·(w + p_new·u)`` from plain sums of weights."""
    column = tl.arange(0, WIDTH)
    inside = column < D
    # a token that sees nothing has a row of zeros
    share = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    u = u * share
    if DEGREE == 2:
        # rounded as it is cached: later tokens see it so
        rounded = u.to(u_out.dtype.element_ty)
        own = own * share
        u = rounded.to(tl.float32)
        second = w * share + own * u
    power = tl.arange(0, 2 * DEGREE)
    c0 = tl.sum(tl.where(power == 0, c, 0.0), 0)
    c1 = tl.sum(tl.where(power == 1, c, 0.0), 0)
    c2 = tl.sum(tl.where(power == 2, c, 0.0), 0)
    y = c0 * v + c1 * u
    if DEGREE == 2:
        y += c2 * second
        tl.store(u_out + column, rounded, mask=inside)
    y_out += tl.program_id(0).to(tl.int64) * D + column
    tl.store(y_out, y.to(y_out.dtype.element_ty), mask=inside)


@triton.jit
def _coefficients(
    theta, base, basis, h, LEARNED: tl.constexpr, BY_HEAD: tl.constexpr, DEGREE: tl.constexpr
):  # fmt: skip
    """``c = base + θ·basis`` of one head: ``(2·DEGREE,)``, after c0, c1 … a zero if there is room.

    Args:
        theta: ``(H, LEARNED)``; base: ``(H, DEGREE + 1)``; basis: ``(LEARNED, DEGREE + 1)``, with
            ``BY_HEAD`` one for each head. Without learned numbers the base alone is read.
    """
    # Triton's ranges have a power of two entries: 2 for degree 1, 4 for degree 2
    power = tl.arange(0, 2 * DEGREE)
    COUNT: tl.constexpr = DEGREE + 1
    c = tl.load(base + h * COUNT + power, power < COUNT, 0.0)
    for number in tl.static_range(LEARNED):
        learned = tl.load(theta + h * LEARNED + number).to(tl.float32)
        row = (h * LEARNED + number) if BY_HEAD else number
        c += learned * tl.load(basis + row * COUNT + power, power < COUNT, 0.0)
    return c
