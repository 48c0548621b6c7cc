"""The filter and its gradient, pass by pass, for any length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from gfsa.operators.fused import backward as backward_kernels
from gfsa.operators.fused import forward as forward_kernels
from gfsa.operators.fused.kernel import Block, Kernel, empty_like, variant
from gfsa.operators.fused.plan import tiles
from gfsa.operators.fused.tiles import FULL_MASK, KEY_MASK, NO_MASK


@dataclass(frozen=True)
class Options:
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


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    options: Options,
    w: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, U, LSE)``: the filter, ``A·V``, and each row's natural logsumexp ``(B, H, N)``.

    ``w``, if given, takes ``A·U``.
    """
    u, lse = _first_pass(q, k, v, options)
    out = empty_like(q)
    launch = _Launch("combine", q, k, options)
    rows, cols = launch.rows, launch.cols
    kept = out if w is None else w
    launch(
        (rows(q), cols(k), cols(u), rows(u), rows(v), rows(out), rows(kept)),
        lse,
        coeffs,
        extra=(w is not None,),
    )
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
    """Gradients of q, k, v and the coefficients, from what :func:`forward` returned."""
    du = empty_like(q)
    delta = torch.empty_like(lse)

    launch = _Launch("grad_first_pass", q, k, options)
    rows, cols = launch.rows, launch.cols
    dc = lse.new_empty(q.shape[1], 3, q.shape[0] * launch.grid[0])
    launch(
        (cols(q), rows(k), cols(g), rows(g), rows(v), rows(u), rows(out), rows(du)),
        delta,
        dc,
        lse,
        coeffs,
    )

    launch = _Launch("grad_keys", q, k, options)
    rows, cols = launch.rows, launch.cols
    # a row of k and v for each query head; heads that share keys are added up below
    group = q.shape[1] // k.shape[1]
    dk, dv = (empty_like(x if group == 1 else q) for x in (k, v))
    launch(
        (cols(q), rows(k), rows(v), rows(u), cols(g), rows(g), cols(du), rows(dk), rows(dv)),
        delta,
        lse,
        coeffs,
    )

    launch = _Launch("grad_queries", q, k, options)
    rows, cols = launch.rows, launch.cols
    dq = empty_like(q)
    launch((rows(q), cols(k), cols(v), cols(u), rows(g), rows(du), rows(dq)), delta, lse, coeffs)
    return dq, sum_groups(dk, k), sum_groups(dv, v), dc.sum(2)


def sum_groups(x: Tensor, like: Tensor) -> Tensor:
    """Add up the heads of ``x`` that share one head of ``like``."""
    group = x.shape[1] // like.shape[1]
    if group == 1:
        return x
    total = empty_like(like)
    return torch.sum(x.unflatten(1, (-1, group)), 2, out=total)


def _first_pass(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
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
    launch = _Launch("attend", q, k, options)
    rows, cols = launch.rows, launch.cols
    launch((rows(q), cols(k), cols(v), rows(u)), lse)
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
    "attend": Kernel(forward_kernels.attend),
    "combine": Kernel(forward_kernels.combine),
    "grad_first_pass": Kernel(backward_kernels.grad_first_pass),
    "grad_keys": Kernel(backward_kernels.grad_keys),
    "grad_queries": Kernel(backward_kernels.grad_queries),
}


class _Launch:
    """One kernel over the rows of one problem."""

    def __init__(self, name: str, q: Tensor, k: Tensor, options: Options) -> None:
        batch, heads, length, head_dim = q.shape
        self.kernel = _KERNELS[name]
        self.tiles = tiles(name, head_dim, length, options.is_causal, options.dropout_p > 0)
        self.width = padded(head_dim)
        self.grid = (-(-length // self.tiles.rows), batch * heads, 1)
        self.sizes = (heads, heads // k.shape[1], length)
        self.options = options
        self.variant = variant(q, k)

    def rows(self, x: Tensor) -> tuple[Tensor, Block]:
        """``x`` read or written a block of own rows at a time."""
        return x, (1, 1, self.tiles.rows, self.width)

    def cols(self, x: Tensor) -> tuple[Tensor, Block]:
        """``x`` read a block of the other side's rows at a time."""
        return x, (1, 1, self.tiles.cols, self.width)

    def __call__(
        self,
        tensors: Sequence[tuple[Tensor, Block]],
        *pointers: Tensor,
        extra: tuple[bool, ...] = (),
    ) -> None:
        options = self.options
        mask, strides, kind = mask_arguments(self.sizes, options.mask)
        # a pointer that is never read stands in for a mask or seed that is not there
        unused = tensors[0][0]
        self.kernel(
            self.grid,
            (self.variant, max(strides) >= 2**31),
            tensors,
            (
                *pointers,
                unused if mask is None else mask,
                unused if options.seed is None else options.seed,
                *self.sizes,
                options.scale,
                *strides,
                options.dropout_p,
            ),
            (
                self.width,
                self.tiles.rows,
                self.tiles.cols,
                self.tiles.stages,
                options.is_causal,
                kind,
                options.dropout_p > 0.0,
                *extra,
            ),
            num_warps=self.tiles.warps,
        )


def padded(size: int) -> int:
    """The next power of two, 16 at least: what a tile's side may be."""
    return max(16, 1 << (size - 1).bit_length())


def mask_arguments(
    sizes: tuple[int, int, int], mask: Tensor | None
) -> tuple[Tensor | None, tuple[int, ...], int]:
    """The mask as bytes, its strides over ``(B, H, N, N)``, and its kind."""
    if mask is None:
        return None, (0, 0, 0, 0), NO_MASK.value
    heads, _, length = sizes
    batch = mask.shape[0] if mask.dim() == 4 else 1
    strides = mask.expand(batch, heads, length, length).stride()
    # one sequence of a batch may serve them all
    strides = (strides[0] if batch > 1 else 0, *strides[1:])
    kind = KEY_MASK if strides[2] == 0 or length == 1 else FULL_MASK
    return mask.view(torch.uint8), strides, kind.value
