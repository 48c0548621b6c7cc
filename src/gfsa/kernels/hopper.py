"""The gradient by the Hopper kernels: a launch each for dU and δ, for dK and dV, and for dQ.

Where heads are wide and sequences long, the second adds up dQ as well, in any order, and the third
rounds the sums; not so under ``torch.use_deterministic_algorithms(True)``.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gfsa.kernels.launching import (
    NO_MASK,
    SPANS,
    Block,
    Grid,
    Launch,
    Options,
    Problem,
    Saved,
    empty_like,
    gluon_kernel,
    padded,
    pointers,
    problem_of,
    sum_groups,
)


class Tiles(NamedTuple):
    """How one kernel cuts its work."""

    rows: int
    """Rows that a program owns."""
    cols: int
    """Rows of the other side that it takes at a time."""

    @property
    def warps(self) -> int:
        """A warp computes 16 rows of a product."""
        return self.rows // 16


# by kernel, then by the width of a head on chip: the fastest measured on an H200
TILES: dict[str, dict[int, Tiles]] = {
    "grad_first_pass": {64: Tiles(64, 64), 128: Tiles(64, 64)},
    "grad_keys": {64: Tiles(64, 64), 128: Tiles(128, 64)},
    "grad_queries": {64: Tiles(64, 64), 128: Tiles(128, 64)},
}

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


def backward(g: Tensor, saved: Saved, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    launches = {
        "grad_first_pass": _launch("grad_first_pass", problem),
        "grad_keys": _launch("grad_keys", problem, with_queries),
    }
    if with_queries:
        return {**launches, "finish_queries": _finish_queries(problem)}
    return {**launches, "grad_queries": _launch("grad_queries", problem)}


def _launch(name: str, problem: Problem, *constants: bool) -> Launch:
    """A kernel with the constants that all have, then its own."""
    kernel = gluon_kernel("gluon_hopper", name)
    scale, is_causal, _, _ = problem.options
    mask_b, mask_h, _, mask_j = problem.mask_strides
    width = width_of(problem)
    tiles = TILES[name][width]
    arguments = inspect.signature(kernel.function.fn).parameters
    launch_options: dict[str, Any] = {"num_warps": tiles.warps}
    registers = REGISTERS.get((name, width, problem.mask_kind))
    if registers is not None:
        launch_options["maxnreg"] = registers
    return Launch(
        kernel,
        grid_of(problem, tiles.rows, width),
        problem.variant,
        [block for argument in arguments if (block := block_of(argument, tiles, width))],
        (problem.heads, problem.group, problem.length, scale, mask_b, mask_h, mask_j),
        (
            width,
            tiles.rows,
            tiles.cols,
            is_causal,
            used(problem.head_dim),
            problem.mask_kind,
            *constants,
        ),
        **launch_options,
    )


def _finish_queries(problem: Problem) -> Launch:
    width = width_of(problem)
    tiles = TILES["grad_keys"][width]
    return Launch(
        gluon_kernel("gluon_hopper", "finish_queries"),
        (-(-problem.length // tiles.cols), problem.batch * problem.heads, 1),
        problem.variant,
        [(1, 1, tiles.cols, width)],
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


def block_of(argument: str, tiles: Tiles, width: int) -> Block | None:
    """The tile of a kernel's argument, by its name; None if it is no tile."""
    if argument in ("lse_cols", "delta_cols"):
        return 1, 1, 1, tiles.cols
    sides = {"_rows": tiles.rows, "_cols": tiles.cols}
    side = sides.get(argument[-5:])
    return None if side is None else (1, 1, side, width)
