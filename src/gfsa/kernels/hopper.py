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
    Gradients,
    Grid,
    Launch,
    Options,
    Problem,
    Saved,
    Tiles,
    empty_like,
    gluon_kernel,
    padded,
    pointers,
    problem_of,
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
    q, k, v, u, out, lse, coeffs, mask, _ = saved
    problem = problem_of(q, k, mask, options)
    with_queries = adds_up_queries(problem)
    launches = _launches(problem, with_queries)
    mask, _ = pointers(mask, None, unused=q)
    lse = copyable_by_row(lse)
    du, delta = empty_like(q), torch.empty_like(lse)
    lses, deltas = as_tiles(lse), as_tiles(delta)
    grad_first = launches["grad_first_pass"]
    dc = lse.new_empty(q.shape[1], 3, math.prod(grad_first.grid) // q.shape[1])
    grad_first((q, g, lses, k, g, v, u, out, du), delta, dc, coeffs, mask)
    # a row of k and v for each query head; heads that share keys are added up below
    grouped = q.shape[1] != k.shape[1]
    dk, dv = (empty_like(q if grouped else x) for x in (k, v))
    sums = _zeros(problem, q.device) if with_queries else coeffs
    grad_keys = launches["grad_keys"]
    grad_keys((q, g, du, lses, deltas, k, v, u, g, dk, dv), coeffs, mask, sums)
    if with_queries:
        # dQ may lie where dU was: sums take twice as much beside it
        del du
        dq = empty_like(q)
        launches["finish_queries"]((dq,), sums)
        del sums
    else:
        dq = empty_like(q)
        launches["grad_queries"]((k, v, u, q, g, du, dq), delta, lse, coeffs, mask)
    return dq, sum_groups(dk, k), sum_groups(dv, v), dc


def adds_up_queries(problem: Problem) -> bool:
    """Whether dQ is added up in any order by the kernel of dK and dV, where that was faster.

    With documents it gains a fiftieth, and where products leave features out (:func:`used`) it
    loses. Keys beyond the last one must not be there: the causal mask hides them.
    """
    return (
        problem.head_dim == 128
        and problem.mask_kind == NO_MASK
        and problem.options.is_causal
        and problem.length >= LEAST_WITH_QUERIES
        and not torch.are_deterministic_algorithms_enabled()
    )


def _zeros(problem: Problem, device: torch.device) -> Tensor:
    """Sums of dQ, in float32: whole tiles of all heads."""
    width = width_of(problem)
    cols = TILES["grad_keys"][width].cols
    tiles = -(-problem.length // cols)
    return torch.zeros(problem.batch * problem.heads, tiles, cols, width, device=device)


def copyable_by_row(x: Tensor) -> Tensor:
    """Numbers ``(B, H, N)``, or a copy that is contiguous and begins where the copy engine can."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def as_tiles(x: Tensor) -> Tensor:
    """Numbers ``(B, H, N)`` in the four dimensions that launches describe."""
    return x.view(*x.shape[:2], 1, x.shape[2])


@functools.lru_cache(maxsize=1024)
def _launches(problem: Problem, with_queries: bool) -> dict[str, Launch]:
    """Each kernel over the rows of one problem."""
    names = ["grad_first_pass", "grad_keys", *([] if with_queries else ["grad_queries"])]
    launches = {name: _launch(name, problem, with_queries) for name in names}
    if with_queries:
        launches["finish_queries"] = _finish_queries(problem)
    return launches


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
    scale, is_causal, _, _ = problem.options
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
    q, k, v, _, out, lse, coeffs, mask, _ = saved
    lse = copyable_by_row(lse)
    problem = problem_of(q, k, mask, options)
    grad_queries, grad_keys = _launches_once(problem, coeffs.shape[1])
    spans, _ = pointers(mask, None, unused=q)
    delta, dq = torch.empty_like(lse), empty_like(q)
    du = empty_like(g) if options.exclusive else g
    grad_queries((k, v, q, g, v, out, dq, du), delta, lse, coeffs, spans)
    # a row of k and v for each query head; heads that share keys are added up below
    dk, dv = (empty_like(x if problem.group == 1 else q) for x in (k, v))
    sums = 2 + options.exclusive
    parts = coeffs.new_empty(problem.heads, sums, problem.batch * grad_keys.grid[0])
    grad_keys((q, du, lse, delta, k, v, g, out, dk, dv), parts, coeffs, spans)
    return dq, sum_groups(dk, k), sum_groups(dv, v), parts


@functools.lru_cache(maxsize=1024)
def _launches_once(problem: Problem, powers: int) -> list[Launch]:
    grid = -(-problem.length // ONE_TILES.rows), problem.batch * problem.heads, 1
    strides = problem.mask_strides[:1]
    constants = powers, problem.mask_kind, problem.options.exclusive
    return [
        _of_rows(name, problem, ONE_TILES, grid, strides, constants, {})
        for name in ("grad_queries_one", "grad_keys_one")
    ]
