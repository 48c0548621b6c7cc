"""dQ, dK and dV by one kernel, where that was measured faster than a kernel for dQ alone.

It adds dQ up in any order. Under ``torch.use_deterministic_algorithms(True)`` the kernels serve
that give the same bits in every run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from gfsa.operators.fused.hopper.descriptors import describe
from gfsa.operators.fused.launcher import Kernel, Launch
from gfsa.operators.fused.problem import NO_MASK, Problem

# keys of a program, queries that it takes at a time, and features: one cut
ROWS = 128
COLS = 64
WIDTH = 128
WARPS = 8
# lengths, and least tokens counted once for each head, at which it was measured: at 2,048 it gains
# half as much, too little to give up equal bits
LENGTHS = 4096, 32768
TOKENS = 2**18
# heads that take turns with their blocks
SPAN = 4


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
    """dQ, dK and dV; ``tensors`` are the kernel's tiles in the order of its arguments.

    Sums of dQ take twice the memory of dQ, until it is rounded.
    """
    tokens = -(-problem.length // COLS) * COLS
    heads = problem.batch * problem.heads
    sums = torch.zeros(heads, tokens, WIDTH, dtype=torch.float32, device=dq.device)
    add, finish = _launches(problem)
    add(tensors, sums, coeffs)
    finish((dq,), sums)


@functools.lru_cache(maxsize=1024)
def _launches(problem: Problem) -> tuple[Launch, Launch]:
    cols, rows = (1, 1, COLS, WIDTH), (1, 1, ROWS, WIDTH)
    heads, scale = problem.batch * problem.heads, problem.options.scale
    add, finish = kernels()
    return (
        Launch(
            add,
            (-(-problem.length // ROWS), heads, 1),
            problem.variant,
            [*[cols] * 3, *[(1, 1, 1, COLS)] * 2, *[rows] * 6],
            (problem.heads, problem.group, problem.length, scale),
            (WIDTH, ROWS, COLS, SPAN),
            num_warps=WARPS,
        ),
        Launch(
            finish,
            (-(-problem.length // COLS), heads, 1),
            problem.variant,
            [cols],
            (problem.heads, scale),
            (WIDTH, COLS),
            num_warps=WARPS,
        ),
    )


@functools.cache
def kernels() -> tuple[Kernel, Kernel]:
    """The kernel that adds up, and the one that rounds; Gluon is imported when first used."""
    from gfsa.operators.fused.hopper.tokens import finish_queries, grad_tokens

    return Kernel(grad_tokens, describe), Kernel(finish_queries, describe)
