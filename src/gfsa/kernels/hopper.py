"""The gradient by the Hopper kernels: a launch each for dU and δ, for dK and dV, and for dQ.

Degree 1 has two launches: for δ and dQ, and for dK and dV.

Where heads are wide and sequences long, the second adds up dQ as well, in any order, and the third
rounds the sums; not so under ``torch.use_deterministic_algorithms(True)``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gfsa.kernels.launching import (
    NO_MASK,
    SPANS,
    Given,
    Gradients,
    Grid,
    Launch,
    Launches,
    Options,
    Prepared,
    Problem,
    Room,
    Saved,
    Tiles,
    gluon_kernel,
    padded,
    problem_of,
    room,
    room_like,
    rooms_by_query_head,
    sum_groups,
    tiles_of,
)

# by kernel, then by the width of a head on chip: the fastest measured on an H200
TILES: dict[str, dict[int, Tiles]] = {
    "grad_first_pass": {64: Tiles(64, 64, 4), 128: Tiles(64, 64, 4)},
    "grad_keys": {64: Tiles(64, 64, 4), 128: Tiles(128, 64, 8)},
    "grad_queries": {64: Tiles(64, 64, 4), 128: Tiles(128, 64, 8)},
}
# of degree 1, at every head dim: with twice as many rows both kernels take longer
# (results/kernels.md)
ONE_TILES = Tiles(64, 64, 4)

# with spans, where the compiler would take a few more: room for three programs of four warps
REGISTERS = {("grad_keys", 64, SPANS): 168}

# by the width of a head on chip: most heads that are worked on together, and most tokens of them,
# so that what they share stays in the cache. Timed on an H200 with 1, 2, 4 and 8 wide heads: more
# are faster at 2,048 and 4,096 tokens, fewer at 32,768; the limit between them was not timed
HEADS_AT_A_TIME = {64: 32, 128: 8}
TOKENS_AT_A_TIME = {128: 2**16}
# of narrow heads with spans: two were faster than 4 to 64 in rows of 8,192 tokens
PACKED_HEADS_AT_A_TIME = 2

# shortest sequences of wide heads whose dQ is added up with dK and dV: of 1,024 tokens it gains a
# twentieth of the gradient's time, too little to give up equal bits
LEAST_WITH_QUERIES = 2048


def backward(g: Tensor, saved: Saved, options: Options) -> Gradients:
    """As every gradient of ``op.py``, with key masks or spans at most."""
    q, k, v, u, out, lse, coeffs, mask, *_ = saved
    # numbers in the four dimensions that launches describe
    tiles = q, k, v, u, out, g, lse.contiguous().view(*lse.shape[:2], 1, lse.shape[2])
    deterministic = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv, dc = _BACKWARD(tiles, (coeffs,), mask, options, deterministic)
    return dq, sum_groups(dk, k), sum_groups(dv, v), dc


def _prepare(given: Given, options: Options, deterministic: bool) -> Prepared:
    q, lse = given["q"], given["lse"]
    problem = problem_of(q, given["k"], given["mask"], options)
    with_queries = adds_up_queries(problem, deterministic)
    grad_first, grad_keys = (
        _launch(name, problem, with_queries) for name in ("grad_first_pass", "grad_keys")
    )
    parts = q.shape[1], 3, math.prod(grad_first.grid) // q.shape[1]
    rooms = {"du": room_like(q), "delta": room(lse.shape, lse), "parts": room(parts, lse)}
    rooms |= rooms_by_query_head(given)
    if with_queries:
        # dQ is written where dU was: sums take twice as much beside it
        dq, sums = "du", "sums"
        rooms["sums"] = _zeros(problem, q.device)
        last = _finish_queries(problem), dq, sums
    else:
        dq, sums = "dq", "coeffs"
        rooms["dq"] = room_like(q)
        grad_queries = _launch("grad_queries", problem, with_queries)
        last = grad_queries, "k v u q g du dq", "delta lse coeffs mask"
    steps = [
        (grad_first, "q g lse k g v u out du", "delta parts coeffs mask"),
        (grad_keys, "q g du lse delta k v u g dk dv", f"coeffs mask {sums}"),
        last,
    ]
    return Prepared(given, rooms, steps, f"{dq} dk dv parts")


_BACKWARD = Launches[Gradients](_prepare, "q k v u out g lse", "coeffs")


def adds_up_queries(problem: Problem, deterministic: bool) -> bool:
    """Whether dQ is added up in any order by the kernel of dK and dV, where that was faster.

    With documents it gains a fiftieth, and where products leave features out (:func:`used`) it
    loses. Keys beyond the last one must not be there: the causal mask hides them, or whole tiles
    have none.
    """
    return (
        problem.head_dim == 128
        and problem.mask_kind == NO_MASK
        and (problem.options.is_causal or problem.length % TILES["grad_keys"][128].rows == 0)
        and problem.length >= LEAST_WITH_QUERIES
        and not deterministic
    )


def _zeros(problem: Problem, device: torch.device) -> Room:
    """Sums of dQ, in float32: whole tiles of all heads."""
    width = width_of(problem)
    cols = TILES["grad_keys"][width].cols
    tiles = -(-problem.length // cols)
    shape = problem.batch * problem.heads, tiles, cols, width
    return functools.partial(torch.zeros, shape, dtype=torch.float32, device=device)


def _launch(name: str, problem: Problem, with_queries: bool) -> Launch:
    mask_b, mask_h, _, mask_j = problem.mask_strides
    width = width_of(problem)
    tiles = TILES[name][width]
    registers = REGISTERS.get((name, width, problem.mask_kind))
    constants: tuple[Any, ...] = used(problem.head_dim), problem.mask_kind
    if name == "grad_keys":
        constants = *constants, with_queries
    options = {} if registers is None else {"maxnreg": registers}
    grid = grid_of(problem, tiles.rows, width)
    return _of_rows(name, problem, tiles, grid, (mask_b, mask_h, mask_j), constants, options)


def _of_rows(
    name: str,
    problem: Problem,
    tiles: Tiles,
    grid: Grid,
    mask_strides: tuple[int, ...],
    constants: tuple[Any, ...],
    options: Mapping[str, int],
) -> Launch:
    """A kernel with the numbers and constants that all have, then its own."""
    kernel, width = gluon_kernel("gluon_hopper", name), width_of(problem)
    scale, is_causal, *_ = problem.options
    return Launch(
        kernel,
        grid,
        problem.variant,
        tiles_of(kernel, tiles, width),
        (*problem.sizes, scale, *mask_strides),
        (width, tiles.rows, tiles.cols, is_causal, *constants),
        num_warps=tiles.warps,
        **options,
    )


def _finish_queries(problem: Problem) -> Launch:
    width = width_of(problem)
    tiles = TILES["grad_keys"][width]
    kernel = gluon_kernel("gluon_hopper", "finish_queries")
    return Launch(
        kernel,
        (-(-problem.length // tiles.cols), problem.batch * problem.heads, 1),
        problem.variant,
        tiles_of(kernel, tiles, width),
        (problem.heads, problem.options.scale),
        (width, tiles.cols),
        num_warps=tiles.warps,
    )


def width_of(problem: Problem) -> int:
    """Features of a head on chip: a row of a tile has 128 bytes or more, as the swizzle does."""
    return max(64, padded(problem.head_dim))


def grid_of(problem: Problem, rows: int, width: int) -> Grid:
    """A program for each block of ``rows`` tokens of each head, in the order of the launch."""
    blocks, heads = -(-problem.length // rows), problem.batch * problem.heads
    most = heads_at_a_time(problem, width)
    together = max(x for x in range(1, most + 1) if heads % x == 0)
    return together, blocks, heads // together


def heads_at_a_time(problem: Problem, width: int) -> int:
    """How many heads at most are worked on together."""
    if problem.mask_kind == SPANS and width == 64:
        return PACKED_HEADS_AT_A_TIME
    most = HEADS_AT_A_TIME[width]
    if width in TOKENS_AT_A_TIME:
        most = max(1, min(most, TOKENS_AT_A_TIME[width] // problem.length))
    return most


def used(head_dim: int) -> int:
    """How many features of a head products read: whole tiles, or less of the second half."""
    return next(features for features in (64, 80, 96, 128) if features >= head_dim)


def backward_once(g: Tensor, saved: Saved, options: Options) -> Gradients:
    """As every gradient of ``op.py``, of degree 1 in one pass."""
    q, k, v, _, out, lse, coeffs, mask, _, share = saved
    tiles = q, k, v, out, g, lse.contiguous()
    # hooks on saved tensors may return them in another layout
    numbers = coeffs.contiguous(), None if share is None else share.contiguous()
    dq, dk, dv, parts = _BACKWARD_ONCE(tiles, numbers, mask, options)
    return dq, sum_groups(dk, k), sum_groups(dv, v), parts


def _prepare_once(given: Given, options: Options) -> Prepared:
    q, lse, powers = given["q"], given["lse"], given["coeffs"].shape[1]
    problem = problem_of(q, given["k"], given["mask"], options)
    grad_queries, grad_keys = _launches_once(problem, powers)
    parts = problem.heads, 2 + options.exclusive, problem.batch * grad_keys.grid[0]
    rooms = {"delta": room(lse.shape, lse), "dq": room_like(q), **rooms_by_query_head(given)}
    rooms["parts"] = room(parts, lse)
    du = "g"
    if options.exclusive:
        du, rooms["du"] = "du", room_like(given["g"])
    steps = [
        (grad_queries, f"k v q g v out dq {du}", "delta lse coeffs share mask"),
        (grad_keys, f"q {du} lse delta k v g out dk dv", "parts coeffs share mask"),
    ]
    return Prepared(given, rooms, steps, "dq dk dv parts")


_BACKWARD_ONCE = Launches[Gradients](_prepare_once, "q k v out g lse", "coeffs share")


def _launches_once(problem: Problem, powers: int) -> list[Launch]:
    grid = -(-problem.length // ONE_TILES.rows), problem.batch * problem.heads, 1
    strides = problem.mask_strides[:1]
    options = problem.options
    constants = used(problem.head_dim), powers, problem.mask_kind, options.exclusive
    return [
        _of_rows(name, problem, ONE_TILES, grid, strides, (*constants, *own), {})
        for name, own in (("grad_queries_one", ()), ("grad_keys_one", (options.sums,)))
    ]
