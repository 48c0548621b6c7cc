"""Launches of the one-pass kernels of degree 1: tiles, the order of blocks, and tensors."""

from __future__ import annotations

import functools
import inspect
from typing import NamedTuple

import torch
from torch import Tensor

from gfsa.operators.fused import degree_one_kernels as kernels
from gfsa.operators.fused import degree_one_wide as wide
from gfsa.operators.fused import eligibility
from gfsa.operators.fused.hopper import degree_one_path as hopper
from gfsa.operators.fused.launcher import Block, Kernel, Launch
from gfsa.operators.fused.layout import empty_like, sum_groups
from gfsa.operators.fused.problem import Options, Problem, padded, pointers, problem_of
from gfsa.operators.fused.sweep import degree_one_path as sweep
from gfsa.operators.fused.tile_access import describe

# keys and values of heads that go through their blocks together: half of an H200's cache
CACHED_BYTES = 24 * 2**20


class Tiles(NamedTuple):
    """How one kernel cuts its work."""

    rows: int
    """Rows that a program owns."""
    cols: int
    """Rows of the other side that it takes at a time."""
    warps: int
    stages: int
    """Depth of the load pipeline."""


# the fastest measured on an H200
TILES = {
    "attend_once": Tiles(64, 64, 4, 2),
    "grad_queries_once": Tiles(64, 64, 4, 2),
    "grad_keys_once": Tiles(64, 64, 4, 3),
}
# wider steps where every query sees every key, from this length on
WIDE = {"attend_once": Tiles(64, 128, 4, 2)}
WIDE_FROM = 512


def tiles(name: str, length: int, is_causal: bool) -> Tiles:
    """The tiles of one kernel for one call."""
    if name in WIDE and length >= WIDE_FROM and not is_causal:
        return WIDE[name]
    return TILES[name]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    options: Options,
    keeps: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, U, LSE)``: the filter, ``A·V``, and each row's logsumexp.

    Args:
        q: ``(B, H, N, D)``; k, v: ``(B, H / group, N, D)``; all of layouts that
            :func:`~gfsa.operators.fused.layout.copyable_by_tile` gives.
        coeffs: ``(H, 2)`` or ``(H, 3)``, float32, contiguous.
        mask: bool, broadcastable to ``(B, 1, 1, N)``, True takes part; or spans with causality, see
            :func:`~gfsa.operators.fused.problem.are_spans`.
        keeps: for cuDNN's gradient: U is saved and logsumexps are natural, ``(B, H, N)``. Without
            it U is empty, and logsumexps are to base 2, ``(B, H, 1, N or more)``.
    """
    u = empty_like(q) if keeps else q.new_empty(0)
    lse = q.new_empty(statistics_shape(q, keeps), dtype=torch.float32)
    if keeps or eligibility.refusal_by_sweep_once(q, mask, options.is_causal) is None:
        out = sweep.forward(q, k, v, coeffs, mask, options, lse, u if keeps else None)
        return out, u, lse
    problem, powers = problem_of(q, k, mask, options), coeffs.shape[1]
    out = empty_like(q)
    launch = _launch("attend_once", problem, powers, _strides(q, v))
    mask_bytes, _ = pointers(mask, None, unused=q)
    launch((k, v, out), q, v, lse, coeffs, mask_bytes)
    return out, u, lse


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    u: Tensor,
    lse: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, and partial sums of the coefficients' ``(H, 2, any number)``."""
    if u.numel():
        return wide.backward(g, q, k, v, u, lse, coeffs, options)
    if hopper.serves(q, mask):
        return hopper.backward(g, q, k, v, out, lse, coeffs, mask, options)
    problem, powers = problem_of(q, k, mask, options), coeffs.shape[1]
    mask_bytes, _ = pointers(mask, None, unused=q)
    delta, dq = torch.empty_like(lse), empty_like(q)
    queries = _launch("grad_queries_once", problem, powers, _strides(q, v, g, out))
    queries((k, v, dq), q, v, g, out, lse, delta, coeffs, mask_bytes)
    # a row of k and v for each query head; heads that share keys are added up below
    dk, dv = (empty_like(x if problem.group == 1 else q) for x in (k, v))
    keys = _launch("grad_keys_once", problem, powers, _strides(k, v, g))
    parts = coeffs.new_empty(problem.heads, 2, keys.grid[0] // problem.heads)
    keys((q, g, lse, delta, dk, dv), k, v, g, parts, coeffs, mask_bytes)
    return dq, sum_groups(dk, k), sum_groups(dv, v), parts


def statistics_shape(q: Tensor, keeps: bool = False) -> tuple[int, ...]:
    """The shape of logsumexps, and of δ without ``keeps``, which is that of :func:`forward`."""
    batch, heads, length, _ = q.shape
    if keeps:
        return batch, heads, length
    return batch, heads, 1, (length + 15) // 16 * 16


_KERNELS = {
    function.fn.__name__: Kernel(function, describe)
    for function in (kernels.attend_once, kernels.grad_queries_once, kernels.grad_keys_once)
}


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides over sequences, heads and rows, in 16 bytes, of what a kernel reads by itself."""
    size = tensors[0].element_size()
    return tuple([stride * size // 16 for x in tensors for stride in x.stride()[:3]])


@functools.lru_cache(maxsize=1024)
def _launch(name: str, problem: Problem, powers: int, strides: tuple[int, ...]) -> Launch:
    """One kernel over the rows of one problem, ``strides`` as by :func:`_strides`."""
    kernel = _KERNELS[name]
    scale, is_causal, _ = problem.options
    cut = tiles(name, problem.length, is_causal)
    blocks, total = -(-problem.length // cut.rows), problem.batch * problem.heads
    width = padded(problem.head_dim)
    mask_b, _, _, mask_j = problem.mask_strides
    return Launch(
        kernel,
        (blocks * total, 1, 1),
        (*problem.variant, cut.warps, *(stride >= 2**31 for stride in strides)),
        [
            block
            for argument in inspect.signature(kernel.function.fn).parameters
            if (block := block_of(argument, cut, width)) is not None
        ],
        (
            *strides,
            problem.heads,
            problem.group,
            problem.length,
            scale,
            blocks,
            total,
            _heads_together(problem),
            0,
            mask_b,
            mask_j,
        ),
        (
            problem.head_dim * problem.dtype.itemsize // 16,
            width,
            cut.rows,
            cut.cols,
            cut.stages,
            powers,
            is_causal,
            problem.mask_kind,
        ),
        num_warps=cut.warps,
    )


def block_of(argument: str, cut: Tiles, width: int) -> Block | None:
    """The tile of a tensor argument, whose name ends in the side that it is on; None of others."""
    if argument in ("lse_cols", "delta_cols"):
        return 1, 1, 1, cut.cols
    if argument.endswith("_rows"):
        return 1, 1, cut.rows, width
    return (1, 1, cut.cols, width) if argument.endswith("_cols") else None


def _heads_together(problem: Problem) -> int:
    """How many heads go through one block before any goes on to the next."""
    if not problem.options.is_causal:
        # all blocks take the same time: head by head, whose keys are then in the cache
        return 1
    head_bytes = 2 * problem.length * problem.head_dim * problem.dtype.itemsize
    return min(problem.batch * problem.heads, max(1, CACHED_BYTES // head_bytes))
