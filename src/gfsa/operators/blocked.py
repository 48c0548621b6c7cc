"""Attention under a described visibility: the mask is written for one block of queries at a time.

Torch's attention takes a mask or causality, but neither a window nor documents. A mask of all
queries and keys has N² entries; here at most :data:`MOST_ENTRIES` of them exist at a time, and a
block of queries is multiplied only with the keys that it can reach.

``torch.compile`` would unroll the blocks and keep all masks for the gradient. A compiled model has
the loop as one operator of torch, ``gfsa::attend_by_rows``, which writes them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.operators.call import AttentionCall, is_exporting, no_autocast
from gfsa.operators.operator import PLAIN, at_least_float32, repeat_heads
from gfsa.operators.visibility import Visibility

MOST_ENTRIES = 2**25
"""Entries of a mask that are written at once, unless a single row of queries has more."""


def apply_described(call: AttentionCall, visible: Visibility, x: Tensor) -> Tensor:
    """``A·x`` for a call whose visibility torch's kernels can only take as a mask."""
    if call.reason_for_torch_alone() is None and _needs_operator(call, visible, x):
        fields = (visible.keys, None, visible.causal, visible.window, visible.documents)
        return attend_operator(call.q, call.k, x, call.scale, *fields)
    return apply_by_rows(call, visible, x)


def apply_by_rows(call: AttentionCall, visible: Visibility, x: Tensor) -> Tensor:
    """``A·x``, the whole mask at once where it is small or torch's attention is replaced."""
    # torch's grouped-query kernels accept no mask
    q, k, x = call.q, repeat_heads(call.k, call.q), repeat_heads(x, call.q)
    dropout_p, scale, length = call.dropout_p, call.scale, call.q.shape[-2]
    if call.reason_for_torch_alone() or rows_at_once(visible, length) >= length:
        return _attend(q, k, x, visible.whole(length, q.device), dropout_p, scale)

    def of_block(q: Tensor, k: Tensor, x: Tensor, rows: slice, keys: slice) -> Tensor:
        mask = visible.block(rows, keys, q.device)
        return _attend(q[..., rows, :], k[..., keys, :], x[..., keys, :], mask, dropout_p, scale)

    blocks = blocks_of(visible, length)
    if not _is_differentiated(q, k, x) or torch.compiler.is_compiling():
        return torch.cat([of_block(q, k, x, *block) for block in blocks], -2)
    from torch.utils.checkpoint import checkpoint

    # without it autograd would keep the masks of all blocks
    parts: list[Any] = [
        checkpoint(of_block, q, k, x, *block, use_reentrant=False) for block in blocks
    ]
    return torch.cat(parts, -2)


def _attend(
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


def blocks_of(visible: Visibility, length: int) -> list[tuple[slice, slice]]:
    """As many queries at a time as share one mask, each time with the keys that they can reach."""
    step, window = rows_at_once(visible, length), visible.window
    blocks = []
    for start in range(0, length, step):
        stop = min(start + step, length)
        first, last = 0, stop if visible.causal else length
        if window is not None:
            first, last = max(0, start - window + 1), min(last, stop + window - 1)
        blocks.append((slice(start, stop), slice(first, last)))
    return blocks


def rows_at_once(visible: Visibility, length: int) -> int:
    """How many queries share one mask."""
    if visible.pairs is not None or length == 0:
        return length
    copies = _masks_in(visible)
    if visible.window is None:
        return max(1, MOST_ENTRIES // (copies * length))
    # with many more rows than the window is wide, most of the mask would be hidden
    rows = max(visible.window, 1024)
    return max(1, min(rows, MOST_ENTRIES // (copies * (rows + 2 * visible.window))))


def _masks_in(visible: Visibility) -> int:
    """How many masks of queries and keys there are: one, one per sequence, or one per head."""
    described = [part for part in (visible.keys, visible.documents) if part is not None]
    return max([1, *(part.shape[:-1].numel() for part in described)])


def _is_differentiated(q: Tensor, k: Tensor, x: Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or x.requires_grad)


def _needs_operator(call: AttentionCall, visible: Visibility, x: Tensor) -> bool:
    """Whether the graph that is compiled would otherwise have N² entries, or many blocks."""
    q, length = call.q, call.q.shape[-2]
    if not torch.compiler.is_compiling() or is_exporting() or visible.pairs is not None:
        return False
    # dropped entries would have to be drawn again for the gradient; and a sharded tensor has no
    # rule for this operator
    if call.dropout_p or type(q) not in PLAIN:
        return False
    if rows_at_once(visible, length) < length:
        return True
    # one mask is kept for all layers, and saves each of them the second run for its gradient: worth
    # as much memory as one layer keeps for q, k, v and A·v
    masks = _masks_in(visible) * length * length
    return _is_differentiated(q, call.k, x) and bool(masks > 4 * q.numel())


_GIVEN = "Tensor q, Tensor k, Tensor x, float? scale"
# those of a Visibility; pairs are always None here
_FIELDS = "Tensor? keys, Tensor? pairs, bool causal, SymInt? window, Tensor? documents"


@torch.library.custom_op(
    "gfsa::attend_by_rows", mutates_args=(), schema=f"({_GIVEN}, {_FIELDS}) -> Tensor"
)
def attend_operator(q: Tensor, k: Tensor, x: Tensor, scale: float | None, *fields: Any) -> Tensor:
    """:func:`apply_by_rows` as one operator, without dropout."""
    with no_autocast(q.device):
        y = apply_by_rows(AttentionCall(q, k, scale=scale), Visibility(*fields), x)
    # the compiler is told this layout before anything has run
    return y.contiguous()


@torch.library.custom_op(
    "gfsa::attend_by_rows_backward",
    mutates_args=(),
    schema=f"(Tensor g, {_GIVEN}, {_FIELDS}) -> (Tensor, Tensor, Tensor)",
)
def attend_operator_backward(
    g: Tensor, q: Tensor, k: Tensor, x: Tensor, scale: float | None, *fields: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and x."""
    visible, shapes = Visibility(*fields), (k.shape, x.shape)
    k, x = repeat_heads(k, q), repeat_heads(x, q)
    dq = q.new_empty(q.shape)
    # each block adds to the gradients of its keys: a sum that is rounded once
    precise = at_least_float32(q.dtype)
    dk, dx = (torch.zeros(y.shape, dtype=precise, device=y.device) for y in (k, x))
    with no_autocast(q.device):
        for rows, keys in blocks_of(visible, q.shape[-2]):
            mask = visible.block(rows, keys, q.device)

            def attend(q: Tensor, k: Tensor, x: Tensor, mask: Tensor = mask) -> Tensor:
                return _attend(q, k, x, mask, 0.0, scale)

            # autograd records nothing inside of an operator
            result: tuple[Any, ...] = torch.func.vjp(
                attend, q[..., rows, :], k[..., keys, :], x[..., keys, :]
            )
            dq[..., rows, :], of_k, of_x = result[1](g[..., rows, :])
            dk[..., keys, :] += of_k
            dx[..., keys, :] += of_x
    # the gradient of a repeated head is the sum over its copies
    dk, dx = (
        y if y.shape == shape else y.unflatten(-3, (shape[-3], -1)).sum(-3)
        for y, shape in zip((dk, dx), shapes, strict=True)
    )
    return dq, dk.to(q.dtype), dx.to(q.dtype)


@attend_operator.register_fake
def _(q: Tensor, k: Tensor, x: Tensor, *_: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], x.shape[-1]))


@attend_operator_backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, x, ctx.scale, keys, _, ctx.causal, ctx.window, documents = inputs
    ctx.save_for_backward(q, k, x, keys, documents)


def _differentiate(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    q, k, x, keys, documents = ctx.saved_tensors
    fields = (keys, None, ctx.causal, ctx.window, documents)
    return (*attend_operator_backward(g, q, k, x, ctx.scale, *fields), *(None,) * 6)


attend_operator.register_autograd(_differentiate, setup_context=_save)
