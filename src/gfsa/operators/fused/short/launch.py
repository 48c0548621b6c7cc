"""The filter and its gradient in one launch each, for sequences that fit on chip.

The kernels are written in Gluon, Triton's lower-level language, whose interface changes from
version to version: :func:`why_not` says where they cannot run, and the passes of any length
take over.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gfsa.operators.fused.eligibility import TRITON, capability, over_keys, same_for_heads
from gfsa.operators.fused.launcher import Block, Kernel, Launch, empty_like, multiprocessors
from gfsa.operators.fused.long.launch import (
    Options,
    Problem,
    padded,
    pointers,
    problem_of,
    sum_groups,
)
from gfsa.operators.fused.long.tiles import FULL_MASK

LONGEST = 256
WIDEST = 64
# a mask's entries are counted in 32 bits
MOST_BETWEEN_ROWS = 2**20
# the versions whose Gluon these kernels were measured and tested with
TRITON_VERSIONS = ((3, 6),)


def why_not(q: Tensor, mask: Tensor | None, scale: float) -> str | None:
    """The reason why the short kernels cannot serve a call, or None if they can."""
    if q.shape[2] > LONGEST or q.shape[3] > WIDEST:
        return f"they take {LONGEST} tokens and a head dim of {WIDEST} at most"
    if scale <= 0.0:
        return "they take positive scales only"
    if mask is not None and not same_for_heads(mask):
        return "they take masks that are the same for every head only"
    if mask is not None and not over_keys(mask):
        row, key = mask.stride()[-2:]
        if mask.shape[-1] != q.shape[2] or key != 1 or row > MOST_BETWEEN_ROWS:
            return "they take masks over queries and keys whose rows lie in one piece only"
    return why_not_here(q)


def why_not_here(q: Tensor) -> str | None:
    """The reason why the short kernels cannot run where ``q`` lies."""
    if not q.is_cuda:
        return "they are written for GPUs"
    # taken apart: the compiler cannot compare a tuple that is a constant to it
    major, minor = capability(q.device)
    if (major, minor) != (9, 0):
        return "they are written for Hopper GPUs"
    if TRITON not in TRITON_VERSIONS:
        return f"they are written for Triton {TRITON_VERSIONS}, found {TRITON}"
    return None


class Plan(NamedTuple):
    """How the kernels cut one length."""

    rows: int
    """Tokens, padded to what the warps hold: 16 a warp."""
    width: int
    """Keys a chunk."""
    full: int
    tail: int

    @property
    def block(self) -> Block:
        return 1, 1, self.rows, WIDEST

    @property
    def constants(self) -> tuple[int, int, int, int, int]:
        return self.rows, WIDEST, self.width, self.full, self.tail


@functools.cache
def plan(length: int, width: int) -> Plan:
    rows = max(64, padded(length))
    full, rest = divmod(length, width)
    tail = padded(rest) if rest else 0
    if tail == width:
        full, tail = full + 1, 0
    return Plan(rows, width, full, tail)


def forward(
    q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, U, LSE)``, as :func:`gfsa.operators.fused.long.launch.forward`."""
    launch = forward_launch(problem_of(q, k, options))
    out, u = empty_like(q), empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    mask, seed = pointers(q, options)
    launch((q, k, v, u, out), lse, coeffs, mask, seed, zero(q.device))
    return out, u, lse


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    out: Tensor,
    lse: Tensor,
    coeffs: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`gfsa.operators.fused.long.launch.backward`."""
    launch = backward_launch(problem_of(q, k, options))
    grouped = q.shape[1] != k.shape[1]
    dq = empty_like(q)
    dk, dv = (empty_like(q if grouped else x) for x in (k, v))
    # a number a row
    dc = lse.new_empty(q.shape[1], 3, q.shape[0] * launch.blocks[0][2])
    mask, seed = pointers(q, options)
    launch((q, k, v, u, out, g, dq, dk, dv), lse, dc, coeffs, mask, seed)
    return dq, sum_groups(dk, k), sum_groups(dv, v), dc


@functools.lru_cache(maxsize=1024)
def forward_launch(problem: Problem) -> Launch:
    cut = plan(problem.length, 64)
    warps = cut.rows // 16
    dropout = problem.dropout_p > 0.0
    # heads in flight on one multiprocessor, as registers and shared memory allow
    crowded = dropout or problem.mask_kind == FULL_MASK.value
    at_once = {4: 3, 8: 1 if crowded else 2, 16: 1}[warps]
    launch_options: dict[str, Any] = {"num_warps": warps}
    if at_once == 2:
        launch_options["maxnreg"] = 128
    total = problem.batch * problem.heads
    mask_b, _, mask_i, mask_j = problem.mask_strides
    return Launch(
        kernels().filter_short,
        (min(total, at_once * multiprocessors(problem.device)), 1, 1),
        problem.variant,
        [cut.block] * 5,
        (
            total,
            problem.heads,
            problem.group,
            problem.length,
            problem.scale,
            mask_b,
            mask_i,
            mask_j,
            problem.dropout_p,
        ),
        (
            *cut.constants,
            problem.length <= 208,
            problem.is_causal,
            problem.mask_kind,
            dropout,
        ),
        **launch_options,
    )


@functools.lru_cache(maxsize=1024)
def backward_launch(problem: Problem) -> Launch:
    length = problem.length
    cut = plan(length, 128 if 64 < length <= 128 else 64)
    mask_b, _, mask_i, mask_j = problem.mask_strides
    return Launch(
        kernels().grad_short,
        (problem.batch * problem.heads, 1, 1),
        problem.variant,
        [cut.block] * 9,
        (
            problem.batch,
            problem.heads,
            problem.group,
            length,
            problem.scale,
            mask_b,
            mask_i,
            mask_j,
            problem.dropout_p,
        ),
        (
            *cut.constants,
            cut.rows > 128,
            length == cut.rows,
            problem.is_causal,
            problem.mask_kind,
            problem.dropout_p > 0.0,
        ),
        num_warps=cut.rows // 16,
    )


class _Kernels:
    """Gluon and all that needs it, imported when first used."""

    def __init__(self) -> None:
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from gfsa.operators.fused.short.backward import grad_short
        from gfsa.operators.fused.short.forward import filter_short

        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)

        def describe(x: Tensor, block: Block) -> Any:
            return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)

        self.filter_short = Kernel(filter_short, describe)
        self.grad_short = Kernel(grad_short, describe)


@functools.cache
def kernels() -> _Kernels:
    return _Kernels()


@functools.cache
def zero(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)
