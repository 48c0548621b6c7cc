"""Elementwise kernels around attention: combinations, their gradients, and coefficients."""

from __future__ import annotations

import triton
import triton.language as tl

from gfsa.kernels.long.tiles import JIT_OPTIONS
from gfsa.kernels.tile_access import load_tile, store_tile


@triton.jit
def directed(v):
    """``v`` and ``⟨v, v⟩`` of each row; 0 and 1 where that is 0 or not finite."""
    square = tl.sum(v * v, 1)
    has_direction = (square > 0.0) & (square < float("inf"))
    return tl.where(has_direction[:, None], v, 0.0), tl.where(has_direction, square, 1.0)


@triton.jit
def own_share(u, v, share):
    """``a·p`` of each row, ``p = ⟨u, v⟩ / ⟨v, v⟩``; 0 where the square of v is 0 or not finite."""
    square = tl.sum(v * v, 1)
    has_direction = (square > 0.0) & (square < float("inf"))
    return tl.where(has_direction, share * tl.sum(u * v, 1) / square, 0.0)


@triton.jit(**JIT_OPTIONS)
def combine_degree_one(
    v_rows, u_rows, out_rows, coeffs, heads,
    BM: tl.constexpr, D: tl.constexpr, POWERS: tl.constexpr, GROUP: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
):  # fmt: skip
    """``c0·V + c1·U``, EXCLUSIVE: without U's part along V; GROUP heads of U share one of V."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    row = tl.program_id(0) * BM
    v = load_tile(v_rows, b, h // GROUP, row, BM, D).to(tl.float32)
    u = load_tile(u_rows, b, h, row, BM, D).to(tl.float32)
    c0, c1 = tl.load(coeffs + h * POWERS), tl.load(coeffs + h * POWERS + 1)
    if EXCLUSIVE:
        own = own_share(u, v, tl.load(coeffs + h * POWERS + 2))
        out = (c0 - own)[:, None] * v + c1 * u
    else:
        out = c0 * v + c1 * u
    store_tile(out_rows, out, b, h, row, BM, D)


@triton.jit(**JIT_OPTIONS)
def grad_degree_one(
    g_rows, v_rows, u_rows, dv_rows, du_rows, coeffs, dc_out, heads,
    BM: tl.constexpr, D: tl.constexpr, POWERS: tl.constexpr, GROUP: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
):  # fmt: skip
    """dV without attention's part, summed over the heads that share V; dU; these rows' part of dc.

    A program takes all heads that share one of V, so that V is read once and nothing is made
    for each of them that is added up later.
    """
    block, blocks = tl.program_id(0), tl.num_programs(0)
    b, key_head = tl.program_id(1) // (heads // GROUP), tl.program_id(1) % (heads // GROUP)
    row = block * BM
    v = load_tile(v_rows, b, key_head, row, BM, D).to(tl.float32)
    dv = tl.zeros((BM, D), tl.float32)
    SUMS: tl.constexpr = 3 if EXCLUSIVE else 2
    if EXCLUSIVE:
        own, square = directed(v)
    parts = tl.num_programs(1) // (heads // GROUP) * blocks
    for member in tl.range(0, GROUP, num_stages=2):
        h = key_head * GROUP + member
        g = load_tile(g_rows, b, h, row, BM, D).to(tl.float32)
        u = load_tile(u_rows, b, h, row, BM, D).to(tl.float32)
        dc = dc_out + h * SUMS * parts + b * blocks + block
        tl.store(dc, tl.sum(tl.sum(g * v, 1), 0))
        tl.store(dc + parts, tl.sum(tl.sum(g * u, 1), 0))
        dv += tl.load(coeffs + h * POWERS) * g
        du = tl.load(coeffs + h * POWERS + 1) * g
        if EXCLUSIVE:
            share = tl.load(coeffs + h * POWERS + 2)
            p = tl.sum(u * own, 1) / square
            along = tl.sum(g * own, 1)
            tl.store(dc + 2 * parts, -tl.sum(p * along, 0))
            weight = share * along / square
            du -= weight[:, None] * own
            dv -= (share * p)[:, None] * g + weight[:, None] * (u - (2.0 * p)[:, None] * own)
        store_tile(du_rows, du, b, h, row, BM, D)
    store_tile(dv_rows, dv, b, key_head, row, BM, D)


@triton.jit(**JIT_OPTIONS)
def add_parts(parts_in, total_out, parts, BLOCK: tl.constexpr):
    """The sum of one row of partial sums."""
    row = tl.program_id(0)
    parts_in += row.to(tl.int64) * parts
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(parts_in + at, mask=at < parts, other=0.0)
    tl.store(total_out + row, tl.sum(total, 0))


@triton.jit(**JIT_OPTIONS)
def fold(
    theta, base, basis, coeffs, heads,
    L: tl.constexpr, ROWS: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """``c = base + θ·basis``, all heads in one program; missing powers are zero."""
    h = tl.arange(0, ROWS)
    there = h < heads
    for power in tl.static_range(3):
        c = tl.zeros((ROWS,), tl.float32)
        if power < POWERS:
            for learned in tl.static_range(L):
                c += tl.load(theta + h * L + learned, mask=there, other=0.0) * tl.load(
                    basis + learned * POWERS + power
                )
            c += tl.load(base + h * POWERS + power, mask=there, other=0.0)
        tl.store(coeffs + h * 3 + power, c, mask=there)


@triton.jit(**JIT_OPTIONS)
def unfold(
    dc, basis, dtheta, parts,
    L: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    POWERS: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """``dθ = dc·basisᵀ`` of one head; the parts of its dc have ``GIVEN`` powers."""
    h = tl.program_id(0)
    dc += h.to(tl.int64) * GIVEN * parts
    power = tl.arange(0, 4)
    total = tl.zeros((4, BLOCK), tl.float32)
    for start in range(0, parts, BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = (power < POWERS)[:, None] & (at < parts)[None, :]
        total += tl.load(dc + power[:, None] * parts + at[None, :], mask=there, other=0.0)
    learned = tl.arange(0, LANES)
    there = (learned < L)[:, None] & (power < POWERS)[None, :]
    rows = tl.load(basis + learned[:, None] * POWERS + power[None, :], mask=there, other=0.0)
    dtheta_h = tl.sum(rows * tl.sum(total, 1)[None, :], 1)
    tl.store(dtheta + h * L + learned, dtheta_h, mask=learned < L)
