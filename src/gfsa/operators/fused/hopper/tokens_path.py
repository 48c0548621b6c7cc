"""dQ, dK and dV by one launch, where that was measured faster than a launch for dQ alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from gfsa.operators.fused.hopper.descriptors import describe
from gfsa.operators.fused.launcher import Kernel, Launch, multiprocessors
from gfsa.operators.fused.problem import NO_MASK, Problem

# keys of a program, queries that it takes at a time, and features: one cut
ROWS = 128
COLS = 64
WIDTH = 128
WARPS = 8
# lengths, and tokens counted once for each head, between which it was measured
LENGTHS = 2048, 32768
TOKENS = 2**18
# heads whose blocks are drawn by turns
SPAN = 4


def serves(problem: Problem) -> bool:
    """Whether one launch was measured faster: long causal sequences of heads of 128 features."""
    least, most = LENGTHS
    return (
        problem.head_dim == WIDTH
        and problem.options.is_causal
        and problem.mask_kind == NO_MASK
        and least <= problem.length <= most
        and problem.batch * problem.heads * problem.length >= TOKENS
    )


def grad_tokens(tensors: Sequence[Tensor], coeffs: Tensor, problem: Problem) -> None:
    """Launch the kernel on its tiles, which are in the order of its arguments."""
    device = tensors[0].device
    tokens = -(-problem.length // COLS) * COLS
    room = heads_with_room(problem)
    sums = torch.empty(room, tokens, WIDTH, dtype=torch.float32, device=device)
    # steps that each block has done, then the number of the next block
    flags = torch.zeros(_blocks(problem) + 1, dtype=torch.int32, device=device)
    _launch(problem, room)(tensors, sums, flags, coeffs)


def heads_with_room(problem: Problem) -> int:
    """How many heads have room for dQ in float32 at a time.

    While the longest block of a head runs, programs begin on twice as many heads as fit on the GPU.
    """
    blocks = -(-problem.length // ROWS)
    begun = 2 * -(-multiprocessors(problem.device) // blocks)
    return min(problem.batch * problem.heads, begun + 2 * SPAN + 1)


def _blocks(problem: Problem) -> int:
    """Blocks of keys of all heads."""
    return problem.batch * problem.heads * -(-problem.length // ROWS)


@functools.lru_cache(maxsize=1024)
def _launch(problem: Problem, room: int) -> Launch:
    cols, rows = (1, 1, COLS, WIDTH), (1, 1, ROWS, WIDTH)
    scale = problem.options.scale
    return Launch(
        kernel(),
        (_blocks(problem), 1, 1),
        problem.variant,
        [*[cols] * 4, *[(1, 1, 1, COLS)] * 2, *[rows] * 6],
        (problem.heads, problem.group, problem.length, scale, room, min(SPAN, room)),
        (WIDTH, ROWS, COLS),
        num_warps=WARPS,
    )


@functools.cache
def kernel() -> Kernel:
    """The kernel; Gluon is imported when it is first used."""
    from gfsa.operators.fused.hopper.tokens import grad_tokens

    return Kernel(grad_tokens, describe)
