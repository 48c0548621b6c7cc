"""The filter and its gradient, pass by pass, for any length."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from gfsa.operators.fused.launcher import Kernel, Launch, empty_like
from gfsa.operators.fused.long import backward as backward_kernels
from gfsa.operators.fused.long import forward as forward_kernels
from gfsa.operators.fused.long.tile_sizes import tiles
from gfsa.operators.fused.long.tiles import FULL_MASK, KEY_MASK, NO_MASK


class Options(NamedTuple):
    """What a call asks for beside its tensors.

    Args:
        mask: bool, broadcastable to ``(B, H, N, N)``, True takes part.
        seed: one int64 on the device; entry (b, h, i, j) of the map is dropped or kept by it.
    """

    scale: float
    is_causal: bool = False
    mask: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None


class Problem(NamedTuple):
    """What launches depend on: calls that agree in this differ in their tensors alone."""

    batch: int
    heads: int
    key_heads: int
    length: int
    head_dim: int
    dtype: torch.dtype
    device: int | None
    scale: float
    is_causal: bool
    dropout_p: float
    mask_strides: tuple[int, int, int, int]
    """Over ``(B, H, N, N)``."""
    mask_kind: int

    @property
    def group(self) -> int:
        """Query heads that share one head of keys."""
        return self.heads // self.key_heads

    @property
    def variant(self) -> tuple[Any, ...]:
        """What compiled code depends on: Triton tells lengths by their divisibility, and ones
        apart, and so it does with the size of a number."""
        return (
            self.device,
            self.dtype,
            self.length % 16 == 0,
            self.length == 1,
            self.group == 1,
            self.group % 16 == 0,
            max(self.mask_strides) >= 2**31,
        )


def problem_of(q: Tensor, k: Tensor, options: Options) -> Problem:
    batch, heads, length, head_dim = q.shape
    mask = options.mask
    strides, kind = (0, 0, 0, 0), NO_MASK.value
    if mask is not None:
        strides, kind = _mask_layout(mask.shape, mask.stride(), length)
    return Problem(
        batch,
        heads,
        k.shape[1],
        length,
        head_dim,
        q.dtype,
        q.device.index,
        options.scale,
        options.is_causal,
        options.dropout_p,
        strides,
        kind,
    )


@functools.lru_cache(maxsize=1024)
def _mask_layout(
    shape: torch.Size, strides: tuple[int, ...], length: int
) -> tuple[tuple[int, int, int, int], int]:
    """A mask's strides over ``(B, H, N, N)`` and its kind."""
    missing = 4 - len(shape)
    # what is broadcast is not walked; one sequence of a batch may serve them all
    walked = [s if n > 1 else 0 for s, n in zip(strides, shape, strict=True)]
    b, h, i, j = (*(0,) * missing, *walked)
    kind = KEY_MASK if i == 0 or length == 1 else FULL_MASK
    return (b, h, i, j), kind.value


def forward(
    q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, U, LSE)``: the filter, ``A·V``, and each row's natural logsumexp ``(B, H, N)``."""
    launches = _launches(problem_of(q, k, options))
    mask, seed = pointers(q, options)
    u, lse = _first_pass(launches, q, k, v, options)
    out = empty_like(q)
    launches["combine"]((q, k, u, u, v, out), lse, coeffs, mask, seed)
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
    """Gradients of q, k and v, and parts of the coefficients' ``(H, 3, any number)``."""
    launches = _launches(problem_of(q, k, options))
    mask, seed = pointers(q, options)
    du, delta = empty_like(q), torch.empty_like(lse)
    grad_first = launches["grad_first_pass"]
    dc = lse.new_empty(q.shape[1], 3, q.shape[0] * grad_first.grid[0])
    grad_first((q, k, g, g, v, u, out, du), delta, dc, lse, coeffs, mask, seed)
    # a row of k and v for each query head; heads that share keys are added up below
    grouped = q.shape[1] != k.shape[1]
    dk, dv = (empty_like(q if grouped else x) for x in (k, v))
    launches["grad_keys"]((q, k, v, u, g, g, du, dk, dv), delta, lse, coeffs, mask, seed)
    dq = empty_like(q)
    launches["grad_queries"]((q, k, v, u, g, du, dq), delta, lse, coeffs, mask, seed)
    return dq, sum_groups(dk, k), sum_groups(dv, v), dc


def sum_groups(x: Tensor, like: Tensor) -> Tensor:
    """Add up the heads of ``x`` that share one head of ``like``."""
    group = x.shape[1] // like.shape[1]
    if group == 1:
        return x
    total = empty_like(like)
    return torch.sum(x.unflatten(1, (-1, group)), 2, out=total)


def _first_pass(
    launches: dict[str, Launch], q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    if cudnn_would_run(q, k, v, options):
        # the very kernel that plain attention runs here: the same bits
        u, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, options.is_causal, False, scale=options.scale
        )
        room = empty_like(q)
        u = u if u.stride() == room.stride() else room.copy_(u)
        return u, lse.view(q.shape[:3])
    u = empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    launches["attend"]((q, k, v, u), lse, *pointers(q, options))
    return u, lse


def cudnn_would_run(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether torch's attention would take cuDNN for the first pass."""
    if not q.is_cuda or options.mask is not None or options.dropout_p or q.shape != k.shape:
        return False
    if options.scale <= 0.0:
        # which cuDNN answers with NaN
        return False
    choice = torch._fused_sdp_choice(
        q, k, v, None, 0.0, options.is_causal, scale=options.scale, enable_gqa=False
    )
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


_KERNELS = {
    each.fn.__name__: Kernel(each)
    for each in (
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
    cut = tiles(
        name,
        problem.head_dim,
        problem.length,
        problem.is_causal,
        problem.dropout_p > 0,
    )
    width = padded(problem.head_dim)
    # a kernel's tensors are named by the side that they are on
    names = inspect.signature(kernel.function.fn).parameters
    sides = {"_rows": cut.rows, "_cols": cut.cols}
    return Launch(
        kernel,
        (-(-problem.length // cut.rows), problem.batch * problem.heads, 1),
        problem.variant,
        [(1, 1, sides[each[-5:]], width) for each in names if each[-5:] in sides],
        (
            problem.heads,
            problem.group,
            problem.length,
            problem.scale,
            *problem.mask_strides,
            problem.dropout_p,
        ),
        (
            width,
            cut.rows,
            cut.cols,
            cut.stages,
            problem.is_causal,
            problem.mask_kind,
            problem.dropout_p > 0.0,
        ),
        num_warps=cut.warps,
    )


def pointers(unused: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Mask and seed; a pointer that is never read stands in for one that is not there."""
    mask, seed = options.mask, options.seed
    return (
        unused if mask is None else mask.view(torch.uint8),
        unused if seed is None else seed,
    )


def padded(size: int) -> int:
    """The next power of two, 16 at least: what a tile's side may be."""
    return max(16, 1 << (size - 1).bit_length())
