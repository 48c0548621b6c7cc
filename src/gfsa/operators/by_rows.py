"""Attention under a described visibility: the mask is written for one block of queries at a time.

Torch's attention takes a mask or causality, and neither a window nor documents. A mask of all
queries and keys has N² entries; here one of at most :data:`MOST_ENTRIES` exists at a time, and a
block of queries is multiplied with the keys that it can reach only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.operators.base import repeat_heads
from gfsa.operators.visibility import Visibility

MOST_ENTRIES = 2**25
"""Entries of a mask that are written at once, unless a single row of queries has more."""


class Block(NamedTuple):
    """The queries ``start … stop``, and the keys ``first … last`` that they can see at most."""

    start: int
    stop: int
    first: int
    last: int


def apply_by_rows(
    visible: Visibility,
    q: Tensor,
    k: Tensor,
    x: Tensor,
    dropout_p: float = 0.0,
    scale: float | None = None,
    in_blocks: bool = True,
) -> Tensor:
    """``A·x`` for queries and keys of the same tokens, ``(..., H, N, D)``.

    Args:
        visible: what each query sees.
        q, k, x: queries, keys and values; keys and values may have fewer heads.
        dropout_p, scale: as torch's attention takes them.
        in_blocks: False writes the mask of all queries at once.
    """
    # torch's grouped-query kernels accept no mask
    k, x = repeat_heads(k, q), repeat_heads(x, q)
    length = q.shape[-2]
    if not in_blocks or rows_at_once(visible, length) >= length:
        return attend(q, k, x, visible.whole(length, q.device), dropout_p, scale)

    def of_block(q: Tensor, k: Tensor, x: Tensor, block: Block) -> Tensor:
        return attend_in_block(visible, block, *parts(block, q, k, x), dropout_p, scale)

    # without this, autograd would keep the masks of all blocks
    recompute = (
        torch.is_grad_enabled()
        and (q.requires_grad or k.requires_grad or x.requires_grad)
        and not torch.compiler.is_compiling()
    )
    rows = []
    for block in blocks(visible, length):
        if recompute:
            rows.append(_checkpoint(of_block, q, k, x, block))
        else:
            rows.append(of_block(q, k, x, block))
    return torch.cat(rows, -2)


def attend(
    q: Tensor, k: Tensor, x: Tensor, mask: Tensor, dropout_p: float, scale: float | None
) -> Tensor:
    """Torch's attention under a bool mask that is written out, all with the same heads."""
    if q.is_cuda:
        mask = as_additive(mask, q.dtype)
    # looked up in each call: context parallel replaces it
    return F.scaled_dot_product_attention(
        q, k, x, attn_mask=mask, dropout_p=dropout_p, is_causal=False, scale=scale
    )


def as_additive(attn_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask (True takes part) as numbers to add to the scores: log 1 = 0, log 0 = -inf.

    For a row without any key and a bool mask, cuDNN's attention averages values that the mask hides
    and gives NaN gradients; for an additive mask it gives zeros.
    """
    return attn_mask.to(dtype).log()


def attend_in_block(
    visible: Visibility,
    block: Block,
    q: Tensor,
    k: Tensor,
    x: Tensor,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """:func:`attend` for the :func:`parts` of one block."""
    return attend(q, k, x, visible.block(*block, q.device), dropout_p, scale)


def parts(block: Block, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries of a block, and the keys and values that they can see."""
    start, stop, first, last = block
    return q[..., start:stop, :], k[..., first:last, :], x[..., first:last, :]


def blocks(visible: Visibility, length: int) -> list[Block]:
    """All queries, as many at a time as share one mask."""
    step = rows_at_once(visible, length)
    edges = [(start, min(start + step, length)) for start in range(0, length, step)]
    return [Block(*edge, *_reach(visible, *edge, length)) for edge in edges]


def rows_at_once(visible: Visibility, length: int) -> int:
    """How many queries share one mask."""
    if visible.pairs is not None:
        return length
    copies = masks_in(visible)
    if visible.window is None:
        return max(1, MOST_ENTRIES // (copies * length))
    # with many more rows than the window is wide, most of the mask would be hidden
    rows = max(visible.window, 1024)
    return max(1, min(rows, MOST_ENTRIES // (copies * (rows + 2 * visible.window))))


def masks_in(visible: Visibility) -> int:
    """How many masks of queries and keys there are: one, or one a sequence, or a head."""
    copies = 1
    for part in (visible.keys, visible.documents):
        if part is not None:
            copies = max(copies, part.numel() // part.shape[-1])
    return copies


def _checkpoint(function: Callable[..., Tensor], *args: Tensor | Block) -> Tensor:
    """Call ``function``, and once more for its gradient."""
    from torch.utils.checkpoint import checkpoint

    result: Tensor = checkpoint(function, *args, use_reentrant=False)
    return result


def _reach(visible: Visibility, start: int, stop: int, length: int) -> tuple[int, int]:
    """The keys that queries ``start … stop`` can see at most."""
    first, last = 0, stop if visible.causal else length
    if visible.window is not None:
        first, last = max(0, start - visible.window + 1), min(last, stop + visible.window - 1)
    return first, last
