"""dQ, dK and dV by one kernel, where that was measured faster than a kernel for dQ alone.

It adds dQ up in any order. Under ``torch.use_deterministic_algorithms(True)`` the kernels serve
that give the same bits in every run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gfsa.operators.fused.hopper.descriptors import describe
from gfsa.operators.fused.hopper.turns import heads_by_turns
from gfsa.operators.fused.launcher import Kernel, Launch
from gfsa.operators.fused.problem import NO_MASK, Problem

# keys of a program, queries that it takes at a time, and features: one cut
ROWS = 128
COLS = 64
WIDTH = 128
WARPS = 8
# lengths, and tokens counted once for each head, between which it was measured
LENGTHS = 2048, 32768
TOKENS = 2**18
# tokens, counted once for each head, whose dQ is added up at a time: 64 MiB in float32
TOKENS_AT_A_TIME = 2**17


def serves(problem: Problem) -> bool:
    """Whether one kernel was measured faster: long causal sequences of heads of 128 features."""
    least, most = LENGTHS
    return (
        problem.head_dim == WIDTH
        and problem.options.is_causal
        and problem.mask_kind == NO_MASK
        and least <= problem.length <= most
        and problem.batch * problem.heads * problem.length >= TOKENS
        and not torch.are_deterministic_algorithms_enabled()
    )


def grad_tokens(tensors: Sequence[Tensor], dq: Tensor, coeffs: Tensor, problem: Problem) -> None:
    """dQ, dK and dV; ``tensors`` are the kernel's tiles in the order of its arguments."""
    for first, count in pieces(problem):
        tokens = -(-problem.length // COLS) * COLS
        sums = torch.zeros(count, tokens, WIDTH, dtype=torch.float32, device=dq.device)
        add, finish = _launches(problem, count)
        add(tensors, sums, coeffs, numbers=(first, *add.numbers[1:]))
        finish((dq,), sums, numbers=(first, *finish.numbers[1:]))
        # the next piece takes the same memory
        del sums


def pieces(problem: Problem) -> Iterator[tuple[int, int]]:
    """``(first head, number of heads)`` of all sequences' heads, some at a time."""
    total = problem.batch * problem.heads
    most = max(1, TOKENS_AT_A_TIME // problem.length)
    for first in range(0, total, most):
        yield first, min(most, total - first)


@functools.lru_cache(maxsize=1024)
def _launches(problem: Problem, heads: int) -> tuple[Launch, Launch]:
    """Both kernels for so many heads; their first number is that of the first head."""
    cols, rows = (1, 1, COLS, WIDTH), (1, 1, ROWS, WIDTH)
    scale = problem.options.scale
    add, finish = kernels()
    span = heads_by_turns(problem, ROWS, 1)
    return (
        Launch(
            add,
            (-(-problem.length // ROWS), heads, 1),
            problem.variant,
            [*[cols] * 3, *[(1, 1, 1, COLS)] * 2, *[rows] * 6],
            (0, problem.heads, problem.group, problem.length, scale, span),
            (WIDTH, ROWS, COLS),
            num_warps=WARPS,
        ),
        Launch(
            finish,
            (-(-problem.length // COLS), heads, 1),
            problem.variant,
            [cols],
            (0, problem.heads, scale),
            (WIDTH, COLS),
            num_warps=WARPS,
        ),
    )


@functools.cache
def kernels() -> tuple[Kernel, Kernel]:
    """The kernel that adds up, and the one that rounds; Gluon is imported when first used."""
    from gfsa.operators.fused.hopper.tokens import finish_queries, grad_tokens

    return Kernel(grad_tokens, describe), Kernel(finish_queries, describe)
