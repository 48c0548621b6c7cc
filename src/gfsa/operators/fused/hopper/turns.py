"""How many heads take turns with their blocks under a causal mask."""

from __future__ import annotations

from gfsa.operators.fused.launcher import multiprocessors
from gfsa.operators.fused.problem import Problem


def heads_by_turns(problem: Problem, rows: int, programs: int) -> int:
    """As many heads as give the GPU a program each for their longest blocks, or few more.

    Fewer leave it idle at the end, where long blocks of the last heads run alone; more have no use,
    and do not fit into its cache.

    Args:
        rows: rows of a block.
        programs: how many share a multiprocessor.
    """
    blocks = -(-problem.length // rows)
    heads = -(-multiprocessors(problem.device) * programs // blocks)
    return 1 << (heads - 1).bit_length()
