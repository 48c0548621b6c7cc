r"""Backward kernel: the gradients in one sweep under a causal mask, or in two of half the work.

With g the gradient of the output, U = A·V and z = Aᵀ·g, column block j takes the row blocks i from
the last one to the diagonal. What goes to the values:

.. math::
    z_j = \sum_{i \ge j} P_{ij}^\top g_i, \qquad dU_j = c_1 g_j + c_2 z_j, \qquad
    dV_j = c_0 g_j + \sum_{i \ge j} P_{ij}^\top dU_i, \\
    \delta_i = \langle g, out\rangle_i - c_0 \langle g, V\rangle_i + c_2 \langle z, U\rangle_i ,

and what goes to the scores:

.. math::
    dP_{ij} = c_2\,g_i U_j^\top + dU_i V_j^\top, \qquad dS = P \circ (dP - \delta_i), \\
    dK_j = \sum_{i \ge j} dS_{ij}^\top Q_i, \qquad dQ_i = \sum_{j \le i} dS_{ij} K_j .

``dU_i`` and ``δ_i`` of i > j are there if the column blocks of a head are taken from the last one
to the first. dQ is added up in float32, by one column block after another in this very order, so
repeated runs give the same bits. The coefficients' gradients are partial sums, one a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfsa.operators.fused.causal.wavefront import LIGHT, publish, take_ticket, wait_for
from gfsa.operators.fused.tiles import LOG2E, load_tile, store_tile


@triton.jit(**LIGHT)
def grad_columns(
    q_cols, g_cols, k_rows, v_rows, u_rows, g_rows, out_rows, dq_rows, dk_rows, dv_rows,
    lse_in, coeffs, du, delta, dq_sum, dc_out, progress,
    heads, group, n, scale, total, rows,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    WAVE: tl.constexpr, CHUNK: tl.constexpr, VALUES: tl.constexpr, SCORES: tl.constexpr,
    ATOMIC: tl.constexpr,
):  # fmt: skip
    """BM keys a block, BN queries at a time, BM being a multiple of BN.

    ``du`` and ``dq_sum`` are working memory of ``(B·H, rows, D)``, where rows is n rounded up to a
    multiple of BM.
    VALUES: the gradients of values and coefficients are worked out, and dU and δ written; otherwise
    dU and δ are read. SCORES: the gradients of queries and keys are worked out.
    WAVE: a program takes one block, and follows the block after it; ``progress`` holds how many
    tiles of queries, counted from the last one, are done, a number a block with SCORES and else a
    number a head; the counter of tickets comes last. Without it a program takes all blocks of a
    head, in order.
    """
    blocks = tl.cdiv(n, BM)
    if WAVE:
        ticket = take_ticket(progress + total * blocks)
        _column_block(
            ticket % total, blocks - 1 - ticket // total, blocks,
            q_cols, g_cols, k_rows, v_rows, u_rows, g_rows, out_rows, dq_rows, dk_rows, dv_rows,
            lse_in, coeffs, du, delta, dq_sum, dc_out, progress,
            heads, group, n, scale, total, rows,
            D, BM, BN, STAGES, WAVE, CHUNK, VALUES, SCORES, ATOMIC,
        )  # fmt: skip
    else:
        for step in range(blocks):
            _column_block(
                tl.program_id(0), blocks - 1 - step, blocks,
                q_cols, g_cols, k_rows, v_rows, u_rows, g_rows, out_rows, dq_rows, dk_rows, dv_rows,
                lse_in, coeffs, du, delta, dq_sum, dc_out, progress,
                heads, group, n, scale, total, rows,
                D, BM, BN, STAGES, WAVE, CHUNK, VALUES, SCORES, ATOMIC,
            )  # fmt: skip
            # the program's own next block reads what this one wrote
            tl.debug_barrier()


@triton.jit
def _column_block(
    bh, block, blocks,
    q_cols, g_cols, k_rows, v_rows, u_rows, g_rows, out_rows, dq_rows, dk_rows, dv_rows,
    lse_in, coeffs, du, delta, dq_sum, dc_out, progress,
    heads, group, n, scale, total, rows,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    WAVE: tl.constexpr, CHUNK: tl.constexpr, VALUES: tl.constexpr, SCORES: tl.constexpr,
    ATOMIC: tl.constexpr,
):  # fmt: skip
    b = bh // heads
    h = bh % heads
    key_head = h // group
    row = block * BM
    before = bh.to(tl.int64) * rows
    lse_in += bh.to(tl.int64) * n
    delta += bh.to(tl.int64) * n
    du += before * D
    dq_sum += before * D
    sc = scale * LOG2E
    c0 = tl.load(coeffs + h * 3)
    c1 = tl.load(coeffs + h * 3 + 1)
    c2 = tl.load(coeffs + h * 3 + 2)
    k = load_tile(k_rows, b, key_head, row, BM, D)
    v = k
    u = k
    if SCORES:
        v = load_tile(v_rows, b, key_head, row, BM, D)
        u = load_tile(u_rows, b, h, row, BM, D)
    z = tl.zeros((BM, D), tl.float32)
    dv = tl.zeros((BM, D), tl.float32)
    dk = tl.zeros((BM, D), tl.float32)
    # queries by tiles of BN: those on the diagonal, then those beyond
    first = block * (BM // BN)
    tiles = tl.cdiv(n, BN)
    clear = tl.minimum(first + BM // BN, tiles)
    if WAVE:
        flag = progress + bh
        if SCORES:
            flag = progress + bh * blocks + block
        top = tiles
        while top > clear:
            if SCORES:
                # the block after this one is ahead; a part at a time, for the next one to follow
                ahead = tiles - wait_for(flag + 1, tiles - top + 1)
                low = tl.maximum(tl.maximum(ahead, top - CHUNK), clear)
            else:
                low = tl.maximum(tiles - wait_for(flag, tiles - top + 1), clear)
            z, dv, dk = _rows(
                z, dv, dk, k, v, u, q_cols, g_cols, lse_in, du, delta, dq_sum, b, h, row, n,
                low, top, c2, sc, D, BM, BN, STAGES, VALUES, VALUES, SCORES, False, ATOMIC,
            )  # fmt: skip
            top = low
            if SCORES and top > clear:
                publish(flag, tiles - top)
    else:
        z, dv, dk = _rows(
            z, dv, dk, k, v, u, q_cols, g_cols, lse_in, du, delta, dq_sum, b, h, row, n,
            clear, tiles, c2, sc, D, BM, BN, STAGES, VALUES, VALUES, SCORES, False, ATOMIC,
        )  # fmt: skip
    if VALUES:
        z, dv, dk = _rows(
            z, dv, dk, k, v, u, q_cols, g_cols, lse_in, du, delta, dq_sum, b, h, row, n,
            first, clear, c2, sc, D, BM, BN, STAGES, True, False, False, True, ATOMIC,
        )  # fmt: skip
        _finish_rows(
            z, v_rows, u_rows, g_rows, out_rows, du, delta, dc_out, b, h, key_head, row, n, block,
            blocks, heads, total, c0, c1, c2, D, BM,
        )  # fmt: skip
        # every thread needs the rows that other threads have written
        tl.debug_barrier()
        if WAVE and not SCORES:
            publish(flag, tiles - first)
    z, dv, dk = _rows(
        z, dv, dk, k, v, u, q_cols, g_cols, lse_in, du, delta, dq_sum, b, h, row, n,
        first, clear, c2, sc, D, BM, BN, STAGES, False, VALUES, SCORES, True, ATOMIC,
    )  # fmt: skip
    if VALUES:
        g = load_tile(g_rows, b, h, row, BM, D).to(tl.float32)
        store_tile(dv_rows, c0 * g + dv, b, h, row, BM, D)
    if SCORES:
        if WAVE:
            publish(flag, tiles - first)
        store_tile(dk_rows, dk * scale, b, h, row, BM, D)
        if block == 0:
            # every other column block has been there before this one
            tl.debug_barrier()
            for start in range(0, n, BM):
                at = (start + tl.arange(0, BM))[:, None] * D + tl.arange(0, D)[None, :]
                store_tile(dq_rows, tl.load(dq_sum + at) * scale, b, h, start, BM, D)


@triton.jit
def _finish_rows(
    z, v_rows, u_rows, g_rows, out_rows, du, delta, dc_out, b, h, key_head, row, n, block,
    blocks, heads, total, c0, c1, c2, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """dU, δ and the coefficients' gradients of BM rows, whose z is complete."""
    j = row + tl.arange(0, BM)
    d = tl.arange(0, D)
    g = load_tile(g_rows, b, h, row, BM, D).to(tl.float32)
    at = j[:, None] * D + d[None, :]
    tl.store(du + at, (c1 * g + c2 * z).to(du.dtype.element_ty))
    u = load_tile(u_rows, b, h, row, BM, D).to(tl.float32)
    zu = tl.sum(z * u, 1)
    gu = tl.sum(g * u, 1)
    v = load_tile(v_rows, b, key_head, row, BM, D).to(tl.float32)
    gv = tl.sum(g * v, 1)
    out = load_tile(out_rows, b, h, row, BM, D).to(tl.float32)
    tl.store(delta + j, tl.sum(g * out, 1) - c0 * gv + c2 * zu, mask=j < n)
    # (H, 3, B·blocks), so that what is to be added up lies together
    parts = total // heads * blocks
    dc = dc_out + h * 3 * parts + b * blocks + block
    tl.store(dc, tl.sum(gv, 0))
    tl.store(dc + parts, tl.sum(gu, 0))
    tl.store(dc + 2 * parts, tl.sum(zu, 0))


@triton.jit
def _rows(
    z, dv, dk, k, v, u, q_cols, g_cols, lse_in, du, delta, dq_sum, b, h, row, n,
    low, top, c2, sc,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    Z: tl.constexpr, DV: tl.constexpr, SCORES: tl.constexpr, DIAGONAL: tl.constexpr,
    ATOMIC: tl.constexpr,
):  # fmt: skip
    """Tiles of queries from ``top`` down to ``low``: their part in z, in dV, in dK and dQ."""
    j = row + tl.arange(0, BM)
    d = tl.arange(0, D)
    for step in tl.range(0, top - low, num_stages=STAGES):
        first = (top - 1 - step) * BN
        i = first + tl.arange(0, BN)
        at = i[:, None] * D + d[None, :]
        q = load_tile(q_cols, b, h, first, BN, D)
        lse = tl.load(lse_in + i, mask=i < n, other=float("inf")) * LOG2E
        s = tl.dot(k, tl.trans(q))
        p = tl.exp2(s * sc - lse[None, :])
        if DIAGONAL:
            p = tl.where(i[None, :] >= j[:, None], p, 0.0)
        weight = p.to(k.dtype)
        if Z:
            g = load_tile(g_cols, b, h, first, BN, D)
            z = tl.dot(weight, g, z)
        if DV:
            grad = tl.load(du + at)
            dv = tl.dot(weight, grad, dv)
        if SCORES:
            g = load_tile(g_cols, b, h, first, BN, D)
            grad = tl.load(du + at)
            dp = tl.dot(u, tl.trans(g)) * c2
            dp = tl.dot(v, tl.trans(grad), dp)
            ds = p * (dp - tl.load(delta + i, mask=i < n, other=0.0)[None, :])
            ds = ds.to(k.dtype)
            dk = tl.dot(ds, q, dk)
            part = tl.dot(tl.trans(ds), k)
            # a row block meets its own column block first
            if DIAGONAL:
                tl.store(dq_sum + at, part)
            elif ATOMIC:
                tl.atomic_add(dq_sum + at, part, sem="relaxed")
            else:
                tl.store(dq_sum + at, part + tl.load(dq_sum + at))
    return z, dv, dk
