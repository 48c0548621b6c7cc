"""The filter in one sweep: the plan of a causal one's blocks for degree 2, and the launches.

Other kernels compute its gradient. The kernel itself is in ``gluon_sweep.py``.

**The plan** says which blocks rows of documents and windows are cut into, and what each of them
sees. A block that two documents share waits for all keys of the first one, and each block of the
second one sees a tile more than it needs. So rows are cut at edges, the first tokens of documents
that are at least as long as a block; shorter ones share blocks. Between two edges a block begins
every ROWS tokens, and rows and keys are counted from the edge before, their origin.

Programs take the blocks of a row slot by slot. A slot has the blocks that begin in one window of
ROWS tokens: one that begins with an edge, and one that goes on from the window before. A block
waits for those between it and its origin alone. So a row is gone through in two places at once:
from its beginning, and from an edge near its middle.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from gfsa.kernels.hopper import used, width_of
from gfsa.kernels.launching import (
    SPANS,
    Forward,
    Given,
    Inputs,
    Kernel,
    Launch,
    Launches,
    Options,
    Prepared,
    Problem,
    Room,
    gluon_kernel,
    multiprocessors,
    problem_of,
    result_strides,
    room,
    room_like,
)

# what is planned for a block: its origin, its number and its end, counted from there; by warpgroup
# its first tile, before which key tiles are masked, and the latest of its queries' first keys
ORIGIN = tl.constexpr(0)
BLOCK = tl.constexpr(1)
END = tl.constexpr(2)
FIRST_TILE = tl.constexpr(3)
MASKED_UNTIL = tl.constexpr(5)
LATEST = tl.constexpr(7)
NUMBERS = tl.constexpr(9)


@triton.jit
def _later(x, y):
    return tl.maximum(x, y)


@triton.jit
def _edges(spans, edges, n, blocks, ROWS, WINDOWS):
    """By window the last edge before its end; 0 before them, and the last one again after them."""
    tl.store(edges, 0)
    latest = 0
    for window in range(0, blocks, WINDOWS):
        windows = window + tl.arange(0, WINDOWS)
        i = windows[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        begins = tl.load(spans + i, mask=i < n, other=-1) == i
        last = tl.load(spans + n + i, mask=begins, other=-1)
        # at most one in a window
        edge = tl.max(tl.where(last - i >= ROWS - 1, i, 0), 1)
        edge = tl.maximum(tl.associative_scan(edge, 0, _later), latest)
        tl.store(edges + 1 + windows, edge, mask=windows < blocks)
        latest = tl.max(edge, 0)
    tl.store(edges + 1 + blocks, latest)


@triton.jit
def _seen(spans, origin, row, end, n, there, HALF, TILE):
    """``(first tile, masked until, latest first key)`` of the warpgroup whose queries begin at row.

    First keys do not decrease from query to query, so the first tile is that of the first query.
    Tiles are masked that begin before the latest first key of the queries that see a key before the
    tile on their diagonal; the last of them is the last query that sees the key before that tile.
    """
    diagonal = row // TILE * TILE
    spans += origin
    # a warpgroup beyond the last query sees what that one does
    first = tl.load(spans + tl.minimum(row, end - 1), mask=there, other=0) - origin
    latest = tl.load(spans + tl.minimum(row + HALF, end) - 1, mask=there, other=0) - origin
    before = tl.maximum(tl.minimum(diagonal, end) - 1, 0)
    last = tl.load(spans + n + before, mask=there, other=0) - origin
    last = tl.minimum(last, tl.minimum(row + HALF, end) - 1)
    until = tl.load(spans + last, mask=there, other=0) - origin
    # documents that are out of order may seem to begin before the origin
    return tl.maximum(first, 0) // TILE, tl.where(last >= row, until, 0), latest


@triton.jit(
    do_not_specialize=["n", "blocks", "row_flags", "mask_b"],
    do_not_specialize_on_alignment=["spans"],
)
def plan_blocks(
    spans, flags, n, blocks, row_flags, mask_b,
    ROWS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, POLLED: tl.constexpr,
    WINDOWS: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """The plan of one row, after the flags of all rows, which become zero.

    Args:
        spans: see :func:`gfsa.kernels.launching.are_spans`.
        flags: ``row_flags`` of each row and POLLED more; then for each row the plan, two blocks
            of NUMBERS for each of ``blocks + 1`` slots; then ``blocks + 2`` edges of each row.
        WINDOWS, FLAGS: how many are worked on at a time.
    """
    b = tl.program_id(0)
    rows = tl.num_programs(0)
    plan = flags + rows * row_flags + POLLED
    edges = plan + rows * (blocks + 1) * 2 * NUMBERS + b * (blocks + 2)
    plan += b * (blocks + 1) * 2 * NUMBERS
    flags += b * row_flags
    # those after the row's own are the next row's, or after all flags
    for start in range(0, row_flags + POLLED, FLAGS):
        at = start + tl.arange(0, FLAGS)
        tl.store(flags + at, 0, mask=at < row_flags + POLLED)
    spans += b.to(tl.int64) * mask_b
    _edges(spans, edges, n, blocks, ROWS, WINDOWS)
    tl.debug_barrier()
    # the window of the edge where the second half of the row begins
    middle = tl.load(edges + 1 + blocks // 2) // ROWS
    for start in range(0, blocks, WINDOWS):
        windows = start + tl.arange(0, WINDOWS)
        planned = windows < blocks
        before = tl.load(edges + windows, mask=planned, other=0)
        within = tl.load(edges + windows + 1, mask=planned, other=0)
        after = tl.load(edges + windows + 2, mask=planned, other=0)
        # the slots of the two halves take turns
        lower = windows + tl.minimum(windows, blocks - middle)
        upper = windows - middle + tl.minimum(windows - middle, middle) + 1
        # in a slot first a block that begins with an edge, since others wait for it
        begins = within > before
        which = tl.arange(0, 2)[None, :]
        second = which == 1
        origin = tl.where(second, before[:, None], within[:, None])
        block = tl.where(second, tl.cdiv(windows * ROWS - before, ROWS)[:, None], 0)
        limit = tl.where(after[:, None] > origin, after[:, None], n)
        limit = tl.where(second & begins[:, None], within[:, None], limit) - origin
        there = planned[:, None] & (second | begins[:, None]) & (block * ROWS < limit)
        end = tl.minimum(limit, block * ROWS + ROWS)
        row = block * ROWS
        # all is loaded before anything is stored, which the compiler takes for the same memory
        first, until, latest = _seen(spans, origin, row, end, n, there, HALF, TILE)
        row += HALF
        next_first, next_until, next_latest = _seen(spans, origin, row, end, n, there, HALF, TILE)
        slot = tl.where(windows < middle, lower, upper)[:, None]
        slot = tl.where(second, tl.where(windows > middle, upper, lower)[:, None], slot)
        to = plan + (slot * 2 + which) * NUMBERS
        tl.store(to + ORIGIN, origin, mask=there)
        tl.store(to + BLOCK, block, mask=there)
        tl.store(to + END, tl.where(there, end, 0), mask=planned[:, None])
        tl.store(to + FIRST_TILE, first, mask=there)
        tl.store(to + FIRST_TILE + 1, tl.maximum(next_first, first), mask=there)
        tl.store(to + MASKED_UNTIL, until, mask=there)
        tl.store(to + MASKED_UNTIL + 1, next_until, mask=there)
        tl.store(to + LATEST, latest, mask=there)
        tl.store(to + LATEST + 1, next_latest, mask=there)
        # in the middle's window they have a slot each
        split = windows == middle
        tl.store(plan + lower * 2 * NUMBERS + END, 0, mask=split)
        tl.store(plan + (upper * 2 + 1) * NUMBERS + END, 0, mask=split)


# queries of a block, and of one of its two warpgroups, as in the kernel
ROWS = 128
HALF = 64
# flags that the kernel polls together: it reads so many beyond the last head's
POLLED = 32
# windows of ROWS tokens and flags that the launch before works on at a time
WINDOWS = 64
FLAGS = 2048
# by degree and room for a head: keys a tile, as registers allow; by degree: tiles that fit on the
# chip, and tokens that the copy engine moves at a time, at most
KEYS = {(1, 64): 128, (1, 128): 128, (2, 64): 128, (2, 128): 64}
STAGES = {1: 2, 2: 3}
COPIED = {1: 128, 2: 64}
# tokens, counted once for each head, that are worked on at a time: few stay in the GPU's cache.
# Chosen by times on an H200 at 2,048 to 32,768 tokens
TOKENS_AT_A_TIME = 2**17
# documents that a row with spans is taken to have: a block reads the keys of its own
DOCUMENTS = 4
# bounds of the heads at a time: the fastest measured at 1,024 tokens, and what keeps programs busy
MOST_HEADS = 128
LEAST_HEADS = 4
# keys and values of heads whose blocks of degree 1 are worked on together: half of an H200's cache
CACHED_BYTES = 24 * 2**20
# causal rows of degree 1 from this length on are drawn: their blocks take different times
DRAWN_FROM = 512


def forward(given: Inputs, degree: int = 2) -> Forward:
    """As every route of ``op.py``; spans at most, and no dropout."""
    q, k, v, coeffs, mask, _, options, keeps, share = given
    keeps = degree == 2 or (keeps and options.exclusive)
    return _FORWARD((q, k, v), (coeffs, share), mask, options, degree, keeps)


forward_once = functools.partial(forward, degree=1)


def kept(q: Tensor, keeps: bool) -> dict[str, Room]:
    """Room of degree 1 for U, empty unless it is kept, and for logsumexps, ``(B, H, 1, N …)``."""
    batch, heads, length, _ = q.shape
    shape = batch, heads, 1, (length + 15) // 16 * 16
    u = room_like(q) if keeps else room((0,), q)
    return {"u": u, "lse": room(shape, q, dtype=torch.float32)}


def draws(problem: Problem, degree: int) -> bool:
    """Whether programs draw blocks, which are not equally long, from a counter."""
    return degree == 2 or (problem.options.is_causal and problem.length >= DRAWN_FROM)


def _prepare(given: Given, options: Options, degree: int, keeps: bool) -> Prepared:
    q, mask = given["q"], given["mask"]
    problem = problem_of(q, given["k"], mask, options)
    rooms = {"out": room_like(q), **kept(q, keeps)}
    steps: list[tuple[Launch, str, str]] = []
    strides: tuple[int, ...] = 0, 0, 0
    # the number of the next item
    flags, make_flags = 1, torch.zeros
    if degree == 2:
        rooms["lse"] = room(q.shape[:3], q, dtype=torch.float32)
        strides = result_strides(q)[:3]
        # before it a flag for each half block's U
        blocks = -(-problem.length // ROWS)
        flags = problem.batch * problem.heads * blocks * (ROWS // HALF) + POLLED
        if mask is not None:
            # then the plan of spans, whose launch sets the flags to zero
            flags, make_flags = flags + problem.batch * planned(blocks), torch.empty
            steps = [(_plan(problem), "", "mask flags")]
    if draws(problem, degree):
        rooms["flags"] = functools.partial(make_flags, flags, dtype=torch.int32, device=q.device)
    launch = _launch(problem, degree, given["coeffs"].shape[1], keeps, strides)
    # an address that the kernel neither reads nor writes may be any
    u, counter = "u" if keeps else "out", "flags" if "flags" in rooms else "lse"
    steps.append((launch, f"q k v {u} out", f"out {u} lse coeffs share {counter} mask"))
    return Prepared(given, rooms, steps, "out u lse")


_FORWARD = Launches[Forward](_prepare, "q k v", "coeffs share")


def planned(blocks: int) -> int:
    """The numbers of a sequence's plan and its edges."""
    return (blocks + 1) * 2 * NUMBERS.value + blocks + 2


def heads_at_a_time(problem: Problem, degree: int) -> int:
    if degree == 1 and not problem.options.is_causal:
        # all blocks take the same time: those of a head together, whose keys are then in the cache
        return problem.group
    if degree == 1:
        head_bytes = 2 * problem.length * problem.head_dim * problem.dtype.itemsize
        return max(1, CACHED_BYTES // head_bytes) * problem.group
    tokens = TOKENS_AT_A_TIME * (DOCUMENTS if problem.mask_kind == SPANS else 1)
    return max(LEAST_HEADS, min(MOST_HEADS, tokens // problem.length))


def _launch(
    problem: Problem, degree: int, powers: int, keeps: bool, out_strides: tuple[int, ...]
) -> Launch:
    heads, blocks = problem.batch * problem.heads, -(-problem.length // ROWS)
    dim = width_of(problem)
    rows, keys = (1, 1, HALF, dim), (1, 1, COPIED[degree], dim)
    return Launch(
        gluon_kernel("gluon_sweep", "filter_sweep"),
        (min(heads * blocks, multiprocessors(problem.device)), 1, 1),
        (*problem.variant, max(out_strides) >= 2**31),
        [rows, keys, keys, rows, rows],
        (
            *(heads, *problem.sizes, problem.options.scale, blocks),
            *(min(heads_at_a_time(problem, degree), heads), *out_strides, problem.mask_strides[0]),
        ),
        (
            *(dim, used(problem.head_dim), KEYS[degree, dim], STAGES[degree], problem.mask_kind),
            *(problem.options.is_causal, draws(problem, degree), degree, powers, keeps),
            problem.options.exclusive,
        ),
        num_warps=4,
    )


def _plan(problem: Problem) -> Launch:
    """The launch before the sweep: the plan, and flags that are zero."""
    blocks = -(-problem.length // ROWS)
    flags = problem.heads * blocks * (ROWS // HALF)
    return Launch(
        _PLAN,
        (problem.batch, 1, 1),
        (problem.device,),
        (),
        (problem.length, blocks, flags, problem.mask_strides[0]),
        (ROWS, HALF, KEYS[2, problem.head_dim], POLLED, WINDOWS, FLAGS),
        num_warps=8,
    )


_PLAN = Kernel(plan_blocks)
