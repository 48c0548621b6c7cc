"""The long kernels' path: the filter and its gradient in a launch a pass, for any length."""

from __future__ import annotations

import functools
import inspect

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from gfsa.kernels.launcher import Kernel, Launch
from gfsa.kernels.layout import empty_like, sum_groups
from gfsa.kernels.long import backward as backward_kernels
from gfsa.kernels.long import forward as forward_kernels
from gfsa.kernels.long.tile_sizes import tiles
from gfsa.kernels.problem import (
    SPANS,
    Options,
    Problem,
    Saved,
    padded,
    pointers,
    problem_of,
)
from gfsa.kernels.tile_access import describe


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """As every route of ``autograd.py``."""
    launches = _launches(problem_of(q, k, mask, options))
    extra = pointers(mask, seed, unused=q)
    if cudnn_would_run(q, k, v, mask, options):
        u, lse = _cudnn_first_pass(q, k, v, options)
    else:
        u = empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        launches["attend"]((q, k, v, u), lse, *extra)
    out = empty_like(q)
    launches["combine"]((q, k, u, u, v, out), lse, coeffs, *extra)
    return out, u, lse


def backward(g: Tensor, saved: Saved, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As every route of ``autograd.py``."""
    q, k, v, u, out, lse, coeffs, mask, seed = saved
    launches = _launches(problem_of(q, k, mask, options))
    extra = pointers(mask, seed, unused=q)
    du, delta = empty_like(q), torch.empty_like(lse)
    grad_first = launches["grad_first_pass"]
    dc = lse.new_empty(q.shape[1], 3, q.shape[0] * grad_first.grid[0])
    grad_first((q, k, g, g, v, u, out, du), delta, dc, lse, coeffs, *extra)
    # a row of k and v for each query head; heads that share keys are added up below
    grouped = q.shape[1] != k.shape[1]
    dk, dv = (empty_like(q if grouped else x) for x in (k, v))
    launches["grad_keys"]((q, k, v, u, g, g, du, dk, dv), delta, lse, coeffs, *extra)
    dq = empty_like(q)
    launches["grad_queries"]((q, k, v, u, g, du, dq), delta, lse, coeffs, *extra)
    return dq, sum_groups(dk, k), sum_groups(dv, v), dc


def _cudnn_first_pass(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """``U`` and ``LSE`` by the same kernel as torch's attention, so with the same bits."""
    u, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, options.is_causal, False, scale=options.scale
    )
    room = empty_like(q)
    u = u if u.stride() == room.stride() else room.copy_(u)
    return u, lse.view(q.shape[:3])


def cudnn_would_run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options) -> bool:
    """Whether torch's attention would take cuDNN for the first pass."""
    if not q.is_cuda or mask is not None or options.dropout_p or q.shape != k.shape:
        return False
    if options.scale <= 0.0:
        # cuDNN gives NaN for it
        return False
    choice = torch._fused_sdp_choice(
        q, k, v, None, 0.0, options.is_causal, scale=options.scale, enable_gqa=False
    )
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


_KERNELS = {
    function.fn.__name__: Kernel(function, describe)
    for function in (
        forward_kernels.attend,
        forward_kernels.combine,
        backward_kernels.grad_first_pass,
        backward_kernels.grad_keys,
        backward_kernels.grad_queries,
    )
}


@functools.lru_cache(maxsize=1024)
def _launches(problem: Problem) -> dict[str, Launch]:
    """Each kernel over the rows of one problem."""
    return {name: _launch(name, problem) for name in _KERNELS}


def _launch(name: str, problem: Problem) -> Launch:
    kernel = _KERNELS[name]
    scale, is_causal, dropout_p, _ = problem.options
    packed = problem.mask_kind == SPANS
    cut = tiles(name, problem.head_dim, problem.length, is_causal, dropout_p > 0, packed)
    width = padded(problem.head_dim)
    # the name of each tensor argument ends in the side that it is on
    arguments = inspect.signature(kernel.function.fn).parameters
    sides = {"_rows": cut.rows, "_cols": cut.cols}
    return Launch(
        kernel,
        (-(-problem.length // cut.rows), problem.batch * problem.heads, 1),
        problem.variant,
        [(1, 1, sides[name[-5:]], width) for name in arguments if name[-5:] in sides],
        (
            problem.heads,
            problem.group,
            problem.length,
            scale,
            *problem.mask_strides,
            dropout_p,
        ),
        (
            width,
            cut.rows,
            cut.cols,
            cut.stages,
            is_causal,
            problem.mask_kind,
            dropout_p > 0.0,
        ),
        num_warps=cut.warps,
    )
