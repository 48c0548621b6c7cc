"""The gradient of degree 1 by the Hopper kernels: a launch for dQ and δ, one for dK and dV."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from gfsa.kernels.hopper.backward_path import Tiles, block_of, describe_tiles
from gfsa.kernels.launcher import Kernel, Launch
from gfsa.kernels.layout import empty_like, sum_groups
from gfsa.kernels.problem import Options, Problem, pointers, problem_of

KERNELS = ("grad_queries_one", "grad_keys_one")
# at every head dim: with twice as many rows both kernels take longer (results/kernels.md)
TILES = Tiles(64, 64)


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
    """Gradients of q, k and v, and partial sums of the coefficients' ``(H, 2 or 3, any number)``.

    Args:
        u: ``A·V``, needed for the exclusive term; in its place otherwise, ``out`` is read.
    """
    problem, powers = problem_of(q, k, mask, options), coeffs.shape[1]
    spans, _ = pointers(mask, None, unused=q)
    delta, dq = torch.empty_like(lse), empty_like(q)
    queries = _launch("grad_queries_one", problem, powers)
    du, mixed = (empty_like(g), u) if options.exclusive else (g, out)
    queries((k, v, q, g, v, mixed, dq, du), delta, lse, coeffs, spans)
    # a row of k and v for each query head; heads that share keys are added up below
    dk, dv = (empty_like(x if problem.group == 1 else q) for x in (k, v))
    keys = _launch("grad_keys_one", problem, powers)
    sums = 2 + options.exclusive
    parts = coeffs.new_empty(problem.heads, sums, problem.batch * keys.grid[0])
    keys((q, du, lse, delta, k, v, g, mixed, dk, dv), parts, coeffs, spans)
    return dq, sum_groups(dk, k), sum_groups(dv, v), parts


@functools.cache
def _kernel(name: str) -> Kernel:
    """A kernel by its name; Gluon is imported when one is first used."""
    from gfsa.kernels.hopper import degree_one

    return Kernel(getattr(degree_one, name), describe_tiles())


@functools.lru_cache(maxsize=1024)
def _launch(name: str, problem: Problem, powers: int) -> Launch:
    kernel = _kernel(name)
    scale, is_causal, _, exclusive = problem.options
    arguments: Any = inspect.signature(kernel.function.fn).parameters
    return Launch(
        kernel,
        (-(-problem.length // TILES.rows), problem.batch * problem.heads, 1),
        problem.variant,
        [block for argument in arguments if (block := block_of(argument, TILES, problem.head_dim))],
        (problem.heads, problem.group, problem.length, scale, problem.mask_strides[0]),
        (problem.head_dim, TILES.rows, TILES.cols, is_causal, powers, problem.mask_kind, exclusive),
        num_warps=TILES.warps,
    )
