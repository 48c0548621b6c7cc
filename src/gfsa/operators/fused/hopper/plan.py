"""Which rows the programs of a gradient own, where rows are documents.

Blocks begin with documents that are at least as long as they, as in the plan of the forward sweep
(:mod:`gfsa.operators.fused.sweep.plan`): a block that begins elsewhere sees a tile more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gfsa.operators.fused.sweep.plan import find_edges


@triton.jit(
    do_not_specialize=["n", "blocks", "slots", "mask_b"],
    do_not_specialize_on_alignment=["spans"],
)
def plan_rows(
    spans, plan, n, blocks, slots, mask_b, ROWS: tl.constexpr, WINDOWS: tl.constexpr
):  # fmt: skip
    """The plan of one sequence: first row and end of each block; both are 0 after the last one.

    Args:
        spans: see :func:`gfsa.operators.fused.problem.are_spans`.
        plan: ``slots`` blocks of two numbers for each sequence, then ``blocks + 2`` edges of each.
        blocks: of ROWS rows that a sequence has; slots: how many blocks it may be cut into.
        WINDOWS: how many windows of ROWS tokens are worked on at a time.
    """
    b = tl.program_id(0)
    edges = plan + tl.num_programs(0) * slots * 2 + b * (blocks + 2)
    plan += b * slots * 2
    spans += b.to(tl.int64) * mask_b
    find_edges(spans, edges, n, blocks, slots - blocks, ROWS, WINDOWS)
    tl.debug_barrier()
    known = 0
    for start in range(0, blocks, WINDOWS):
        windows = start + tl.arange(0, WINDOWS)
        planned = windows < blocks
        before = tl.load(edges + windows, mask=planned, other=0)
        within = tl.load(edges + windows + 1, mask=planned, other=0)
        after = tl.load(edges + windows + 2, mask=planned, other=0)
        # a block that goes on from the window before, then one that begins with an edge
        begins = planned & (within > before)
        row = before + tl.cdiv(windows * ROWS - before, ROWS) * ROWS
        limit = tl.where(begins, within, tl.where(after > before, after, n))
        goes_on = planned & (row < limit)
        number = goes_on.to(tl.int32) + begins.to(tl.int32)
        slot = known + tl.cumsum(number, 0) - number
        tl.store(plan + slot * 2, row, mask=goes_on)
        tl.store(plan + slot * 2 + 1, tl.minimum(limit, row + ROWS), mask=goes_on)
        slot += goes_on.to(tl.int32)
        limit = tl.where(after > within, after, n)
        tl.store(plan + slot * 2, within, mask=begins)
        tl.store(plan + slot * 2 + 1, tl.minimum(limit, within + ROWS), mask=begins)
        known += tl.sum(number, 0)
    for start in range(0, slots, WINDOWS):
        slot = start + tl.arange(0, WINDOWS)
        empty = (slot >= known) & (slot < slots)
        tl.store(plan + slot * 2, 0, mask=empty)
        tl.store(plan + slot * 2 + 1, 0, mask=empty)
