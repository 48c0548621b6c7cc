"""Degree 1 under a causal mask in one launch of the sweep's kernel."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from gfsa.kernels.hopper.backward_path import describe_tiles
from gfsa.kernels.launcher import Kernel, Launch, multiprocessors
from gfsa.kernels.layout import empty_like
from gfsa.kernels.problem import Options, Problem, pointers, problem_of

# queries of a block, and of one of its two warpgroups, as in the kernel
ROWS = 128
HALF = 64
# keys and values of heads that are worked on at a time: half of an H200's cache
CACHED_BYTES = 24 * 2**20


class Tiles(NamedTuple):
    """How the kernel cuts the keys."""

    keys: int
    stages: int
    """Tiles of keys, and of values, that are on the chip at a time."""


# at every head dim: the fastest measured on an H200 (results/kernels.md)
TILES = Tiles(128, 2)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    options: Options,
    lse: Tensor,
    u: Tensor | None,
) -> Tensor:
    """The filter; ``lse`` is written, natural if it is ``(B, H, N)``, and ``u`` if it is given.

    Args:
        mask: spans at most, see :func:`~gfsa.kernels.problem.are_spans`.
    """
    problem = problem_of(q, k, mask, options)
    spans, _ = pointers(mask, None, unused=q)
    out = empty_like(q)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    launch = _launch(problem, coeffs.shape[1], u is not None, lse.dim() == 3)
    launch((q, k, v, out if u is None else u, out), lse, coeffs, counter, spans)
    return out


def heads_at_a_time(problem: Problem) -> int:
    head_bytes = 2 * problem.length * problem.head_dim * problem.dtype.itemsize
    cached = max(1, CACHED_BYTES // head_bytes) * problem.group
    return min(problem.batch * problem.heads, cached)


@functools.lru_cache(maxsize=1024)
def _launch(problem: Problem, powers: int, keeps: bool, natural: bool) -> Launch:
    heads, blocks = problem.batch * problem.heads, -(-problem.length // ROWS)
    dim = problem.head_dim
    rows, keys = (1, 1, HALF, dim), (1, 1, TILES.keys, dim)
    return Launch(
        kernel(),
        (min(heads * blocks, multiprocessors(problem.device)), 1, 1),
        problem.variant,
        [rows, keys, keys, rows, rows],
        (
            heads,
            problem.heads,
            problem.group,
            problem.length,
            problem.options.scale,
            blocks,
            heads_at_a_time(problem),
            problem.mask_strides[0],
        ),
        (
            *(dim, TILES.keys, TILES.stages, powers, keeps, natural, problem.mask_kind),
            problem.options.exclusive,
        ),
        num_warps=4,
    )


@functools.cache
def kernel() -> Kernel:
    """The kernel; Gluon is imported when it is first used."""
    from gfsa.kernels.sweep.degree_one import attend_sweep

    return Kernel(attend_sweep, describe_tiles())
