"""The launch of degree 1 in one pass: tiles, the order of blocks, and tensors."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from gfsa.kernels.degree_one_kernels import attend_once
from gfsa.kernels.launcher import Kernel, Launch
from gfsa.kernels.layout import empty_like
from gfsa.kernels.problem import Options, Problem, padded, problem_of
from gfsa.kernels.tile_access import describe

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
TILES = Tiles(64, 64, 4, 2)
# wider steps where every query sees every key, from this length on
WIDE = Tiles(64, 128, 4, 2)
WIDE_FROM = 512


def tiles(length: int, is_causal: bool) -> Tiles:
    """The forward kernel's tiles for one call."""
    return WIDE if length >= WIDE_FROM and not is_causal else TILES


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: None,
    options: Options,
    lse: Tensor,
    u: None = None,
) -> Tensor:
    """The filter, without a mask; ``lse`` is written, and there is no U to be kept."""
    problem, powers = problem_of(q, k, mask, options), coeffs.shape[1]
    out = empty_like(q)
    launch = _launch(problem, powers, _strides(q, v))
    launch((k, v, out), q, v, lse, coeffs)
    return out


_KERNEL = Kernel(attend_once, describe)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides over sequences, heads and rows, in 16 bytes, of what a kernel reads by itself."""
    size = tensors[0].element_size()
    return tuple([stride * size // 16 for x in tensors for stride in x.stride()[:3]])


@functools.lru_cache(maxsize=1024)
def _launch(problem: Problem, powers: int, strides: tuple[int, ...]) -> Launch:
    """The kernel over the rows of one problem, ``strides`` as by :func:`_strides`."""
    scale, is_causal, _ = problem.options
    cut = tiles(problem.length, is_causal)
    blocks, total = -(-problem.length // cut.rows), problem.batch * problem.heads
    width = padded(problem.head_dim)
    return Launch(
        _KERNEL,
        (blocks * total, 1, 1),
        (*problem.variant, cut.warps, *(stride >= 2**31 for stride in strides)),
        [(1, 1, cut.cols, width), (1, 1, cut.cols, width), (1, 1, cut.rows, width)],
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
        ),
        (
            problem.head_dim * problem.dtype.itemsize // 16,
            width,
            cut.rows,
            cut.cols,
            cut.stages,
            powers,
            is_causal,
        ),
        num_warps=cut.warps,
    )


def _heads_together(problem: Problem) -> int:
    """How many heads go through one block before any goes on to the next."""
    if not problem.options.is_causal:
        # all blocks take the same time: head by head, whose keys are then in the cache
        return 1
    head_bytes = 2 * problem.length * problem.head_dim * problem.dtype.itemsize
    return min(problem.batch * problem.heads, max(1, CACHED_BYTES // head_bytes))
