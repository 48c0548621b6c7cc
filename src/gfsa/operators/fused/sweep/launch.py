"""The causal path in one sweep: the filter in one launch; its gradient is the long kernels'."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gfsa.operators.fused.launcher import Block, Kernel, Launch, multiprocessors
from gfsa.operators.fused.layout import empty_like
from gfsa.operators.fused.long import launch as long
from gfsa.operators.fused.problem import SPANS, Options, Problem, Saved, pointers, problem_of
from gfsa.operators.fused.sweep import plan

# queries of a block, and of one of its two warpgroups, as in the kernel
ROWS = 128
HALF = 64
# flags that the kernel looks at together: it reads so many beyond the last head's
LOOKED_AT = 32
# windows of ROWS tokens and flags that the launch before works on at a time
WINDOWS = 64
FLAGS = 2048
# by head dim: 64 keys a tile or twice as many, as registers allow, and tiles that fit on the chip
PARTS = {64: 2, 128: 1}
STAGES = 3
# tokens, counted once for each head, that are worked on at a time: few stay in the GPU's cache.
# Chosen by times on an H200 at 2,048 to 32,768 tokens
TOKENS_AT_A_TIME = 2**17
# documents that a row with spans is taken to have: a block reads the keys of its own
DOCUMENTS = 4
# bounds of the heads at a time: the fastest measured at 1,024 tokens, and what keeps programs busy
MOST_HEADS = 128
LEAST_HEADS = 4


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :meth:`gfsa.operators.fused.dispatch.Path.forward`; spans at most, and no dropout."""
    problem = problem_of(q, k, mask, options)
    out, u = empty_like(q), empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    heads, blocks = problem.batch * problem.heads, -(-problem.length // ROWS)
    # a flag for each half block's U, then the number of the next item
    numbers = heads * blocks * (ROWS // HALF) + LOOKED_AT
    if problem.mask_kind == SPANS:
        spans, _ = pointers(mask, None, unused=q)
        numbers += problem.batch * planned(blocks)
        flags = torch.empty(numbers, dtype=torch.int32, device=q.device)
        _plan(problem)((), spans, flags)
    else:
        spans = q
        flags = torch.zeros(numbers, dtype=torch.int32, device=q.device)
    _launch(problem, out.stride()[:3])((q, k, v, u), out, u, lse, coeffs, flags, spans)
    return out, u, lse


def backward(g: Tensor, saved: Saved, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :meth:`gfsa.operators.fused.dispatch.Path.backward`."""
    return long.backward(g, saved, options)


def planned(blocks: int) -> int:
    """The numbers of a sequence's plan and its edges."""
    return (blocks + 1) * 2 * plan.NUMBERS.value + blocks + 2


def heads_at_a_time(length: int, mask_kind: int) -> int:
    tokens = TOKENS_AT_A_TIME * (DOCUMENTS if mask_kind == SPANS else 1)
    return max(LEAST_HEADS, min(MOST_HEADS, tokens // length))


@functools.lru_cache(maxsize=1024)
def _launch(problem: Problem, out_strides: tuple[int, int, int]) -> Launch:
    heads, blocks = problem.batch * problem.heads, -(-problem.length // ROWS)
    return Launch(
        kernel(),
        (min(heads * blocks, multiprocessors(problem.device)), 1, 1),
        (*problem.variant, max(out_strides) >= 2**31),
        [(1, 1, HALF, problem.head_dim)] * 4,
        (
            heads,
            problem.heads,
            problem.group,
            problem.length,
            problem.options.scale,
            blocks,
            min(heads_at_a_time(problem.length, problem.mask_kind), heads),
            *out_strides,
            problem.mask_strides[0],
        ),
        (problem.head_dim, PARTS[problem.head_dim], STAGES, problem.mask_kind),
        num_warps=4,
    )


@functools.lru_cache(maxsize=1024)
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
        (ROWS, HALF, PARTS[problem.head_dim] * HALF, LOOKED_AT, WINDOWS, FLAGS),
        num_warps=8,
    )


@functools.cache
def kernel() -> Kernel:
    """The kernel; Gluon is imported when it is first used."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from gfsa.operators.fused.sweep.forward import filter_sweep

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)

    def describe(x: Tensor, block: Block) -> Any:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)

    return Kernel(filter_sweep, describe)


_PLAN = Kernel(plan.plan_blocks)
