"""Attention under a described visibility: the mask is written for one block of queries at a time.

Torch's attention takes a mask or causality, and neither a window nor documents. A mask of all
queries and keys has N² entries; here one of at most :data:`MOST_ENTRIES` exists at a time, and a
block of queries is multiplied with the keys that it can reach only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gfsa.operators.base import repeat_heads
from gfsa.operators.visibility import Visibility

MOST_ENTRIES = 2**25
"""Entries of a mask that are written at once, unless a single row of queries has more."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Attention of queries, keys, values and a bool mask."""


def apply_by_rows(
    attend: Attend, visible: Visibility, q: Tensor, k: Tensor, x: Tensor, in_blocks: bool = True
) -> Tensor:
    """``A·x`` for queries and keys of the same tokens, ``(..., H, N, D)``.

    Args:
        attend: attention under a mask that is written out.
        visible: what each query sees.
        q, k, x: queries, keys and values; keys and values may have fewer heads.
        in_blocks: False writes the mask of all queries at once.
    """
    # torch's grouped-query kernels accept no mask
    k, x = repeat_heads(k, q), repeat_heads(x, q)
    length = q.shape[-2]
    step = _rows_at_once(visible, length) if in_blocks else length
    if step >= length:
        return attend(q, k, x, visible.whole(length, q.device))

    def block(q: Tensor, k: Tensor, x: Tensor, start: int, stop: int) -> Tensor:
        first, last = _reach(visible, start, stop, length)
        mask = visible.block(start, stop, first, last, q.device)
        return attend(q[..., start:stop, :], k[..., first:last, :], x[..., first:last, :], mask)

    # without this, autograd would keep the masks of all blocks
    recompute = (
        torch.is_grad_enabled()
        and (q.requires_grad or k.requires_grad or x.requires_grad)
        and not torch.compiler.is_compiling()
    )
    rows = []
    for start in range(0, length, step):
        stop = min(start + step, length)
        if recompute:
            rows.append(_checkpoint(block, q, k, x, start, stop))
        else:
            rows.append(block(q, k, x, start, stop))
    return torch.cat(rows, -2)


def _checkpoint(function: Callable[..., Tensor], *args: Tensor | int) -> Tensor:
    """Call ``function``, and once more for its gradient."""
    from torch.utils.checkpoint import checkpoint

    result: Tensor = checkpoint(function, *args, use_reentrant=False)
    return result


def _rows_at_once(visible: Visibility, length: int) -> int:
    """How many queries share one mask."""
    if visible.pairs is not None:
        return length
    copies = 1
    for part in (visible.keys, visible.documents):
        if part is not None:
            copies = max(copies, part.numel() // part.shape[-1])
    if visible.window is None:
        return max(1, MOST_ENTRIES // (copies * length))
    # with many more rows than the window is wide, most of the mask would be hidden
    rows = max(visible.window, 1024)
    return max(1, min(rows, MOST_ENTRIES // (copies * (rows + 2 * visible.window))))


def _reach(visible: Visibility, start: int, stop: int, length: int) -> tuple[int, int]:
    """The keys that queries ``start … stop`` can see at most."""
    first, last = 0, stop if visible.causal else length
    if visible.window is not None:
        first, last = max(0, start - visible.window + 1), min(last, stop + visible.window - 1)
    return first, last
