"""Which blocks rows of documents and windows are cut into, and what each of them sees.

A block that two documents share waits for all keys of the first one, and each block of the second
one sees a tile more than it needs. So rows are cut at edges, the first tokens of documents that are
at least as long as a block; shorter ones share blocks. Between two edges a block begins every ROWS
tokens, and rows and keys are counted from the edge before, their origin.

Programs take the blocks of a row slot by slot. A slot has the blocks that begin in one window of
ROWS tokens: one that begins with an edge, and one that goes on from the window before. A block
waits for those between it and its origin alone. So a row is gone through in two places at once:
from its beginning, and from an edge near its middle.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def _edges(spans, edges, n, blocks, ROWS: tl.constexpr, WINDOWS: tl.constexpr):
    """By window the last edge before its end; 0 before them, and the last one again after them."""
    tl.store(edges, 0)
    latest = 0
    for window in range(0, blocks + 1, WINDOWS):
        windows = window + tl.arange(0, WINDOWS)
        i = windows[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        begins = tl.load(spans + i, mask=i < n, other=-1) == i
        last = tl.load(spans + n + i, mask=begins, other=-1)
        # at most one in a window
        edge = tl.max(tl.where(last - i >= ROWS - 1, i, 0), 1)
        edge = tl.maximum(tl.associative_scan(edge, 0, _later), latest)
        tl.store(edges + 1 + windows, edge, mask=windows <= blocks)
        latest = tl.max(edge, 0)


@triton.jit
def _plan(
    spans, plan, origin, block, end, n, there, planned,
    ROWS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What blocks see, written to ``plan``; blocks that are not there end at 0.

    First keys do not decrease from query to query, so the first tile of a warpgroup is that of its
    first query. Tiles are masked that begin before the latest first key of the queries that see a
    key before the tile on their diagonal; the last of them is the last query that sees the key
    before that tile.
    """
    tl.store(plan + ORIGIN, origin, mask=there)
    tl.store(plan + BLOCK, block, mask=there)
    tl.store(plan + END, tl.where(there, end, 0), mask=planned)
    spans += origin
    earlier = 0
    for half in tl.static_range(ROWS // HALF):
        row = block * ROWS + half * HALF
        diagonal = row // TILE * TILE
        # a warpgroup beyond the last query sees what that one does
        first = tl.load(spans + tl.minimum(row, end - 1), mask=there, other=0) - origin
        before = tl.maximum(tl.minimum(diagonal, end) - 1, 0)
        last = tl.load(spans + n + before, mask=there, other=0) - origin
        last = tl.minimum(last, tl.minimum(row + HALF, end) - 1)
        until = tl.load(spans + last, mask=there, other=0) - origin
        latest = tl.load(spans + tl.minimum(row + HALF, end) - 1, mask=there, other=0) - origin
        # documents that are out of order may seem to begin before the origin
        tile = tl.maximum(tl.maximum(first, 0) // TILE, earlier)
        earlier = tile
        tl.store(plan + FIRST_TILE + half, tile, mask=there)
        tl.store(plan + MASKED_UNTIL + half, tl.where(last >= row, until, 0), mask=there)
        tl.store(plan + LATEST + half, latest, mask=there)


@triton.jit(
    do_not_specialize=["n", "blocks", "row_flags", "mask_b"],
    do_not_specialize_on_alignment=["spans"],
)
def plan_blocks(
    spans, flags, n, blocks, row_flags, mask_b,
    ROWS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, LOOKED_AT: tl.constexpr,
    WINDOWS: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """The plan of one row, after the flags of all rows, which become zero.

    Args:
        spans: see :func:`gfsa.operators.fused.problem.are_spans`.
        flags: ``row_flags`` of each row and LOOKED_AT more; then for each row the plan, two blocks
            of NUMBERS for each of ``blocks + 1`` slots; then ``blocks + 2`` edges of each row.
        WINDOWS, FLAGS: how many are worked on at a time.
    """
    b = tl.program_id(0)
    rows = tl.num_programs(0)
    plan = flags + rows * row_flags + LOOKED_AT
    edges = plan + rows * (blocks + 1) * 2 * NUMBERS + b * (blocks + 2)
    plan += b * (blocks + 1) * 2 * NUMBERS
    flags += b * row_flags
    # those after the row's own are the next row's, or after all flags
    for start in range(0, row_flags + LOOKED_AT, FLAGS):
        at = start + tl.arange(0, FLAGS)
        tl.store(flags + at, 0, mask=at < row_flags + LOOKED_AT)
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
        # a block that begins with an edge: the first of its slot, since others wait for it
        begins = planned & (within > before)
        slot = plan + tl.where(windows < middle, lower, upper) * 2 * NUMBERS
        limit = tl.where(after > within, after, n)
        end = tl.minimum(limit - within, ROWS)
        _plan(spans, slot, within, windows * 0, end, n, begins, planned, ROWS, HALF, TILE)
        # one that goes on
        block = tl.cdiv(windows * ROWS - before, ROWS)
        limit = tl.where(begins, within, tl.where(after > before, after, n)) - before
        goes_on = planned & (block * ROWS < limit)
        slot = plan + (tl.where(windows > middle, upper, lower) * 2 + 1) * NUMBERS
        end = tl.minimum(limit, block * ROWS + ROWS)
        _plan(spans, slot, before, block, end, n, goes_on, planned, ROWS, HALF, TILE)
        # in the middle's window they have a slot each
        split = windows == middle
        tl.store(plan + lower * 2 * NUMBERS + END, 0, mask=split)
        tl.store(plan + (upper * 2 + 1) * NUMBERS + END, 0, mask=split)
