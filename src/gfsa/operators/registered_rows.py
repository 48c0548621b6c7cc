"""``A·x`` by blocks of queries as one torch operator, for ``torch.compile``.

A compiler would unroll the blocks of :mod:`~gfsa.operators.by_rows`, and keep the masks of all of
them for the gradient: N² entries. The operator here is one node of the graph, keeps its arguments
alone, and writes each mask once more in its gradient, as eager mode does.
"""

# no postponed annotations here: the operator's schema is read from them
from typing import Any

import torch
from torch import Tensor

from gfsa.operators.autocast import no_autocast
from gfsa.operators.base import PLAIN, at_least_float32, repeat_heads
from gfsa.operators.by_rows import Block, attend_in_block, blocks, masks_in, parts, rows_at_once
from gfsa.operators.exporting import is_exporting
from gfsa.operators.visibility import Visibility


def is_needed(visible: Visibility, q: Tensor, k: Tensor, x: Tensor, dropout_p: float) -> bool:
    """Whether the graph that is compiled would otherwise have N² entries, or many blocks."""
    if not torch.compiler.is_compiling() or is_exporting() or visible.pairs is not None:
        return False
    # dropped entries would have to be drawn again for the gradient; and a sharded tensor has no
    # rule for this operator
    if dropout_p or type(q) not in PLAIN:
        return False
    length = q.shape[-2]
    if rows_at_once(visible, length) < length:
        return True
    if not torch.is_grad_enabled() or not (q.requires_grad or k.requires_grad or x.requires_grad):
        return False
    # one mask is kept for all layers, and saves each of them the second run for its gradient: worth
    # as much memory as one layer keeps for q, k, v and A·v
    return bool(masks_in(visible) * length * length > 4 * q.numel())


def apply_registered(
    visible: Visibility, q: Tensor, k: Tensor, x: Tensor, scale: float | None
) -> Tensor:
    """:func:`~gfsa.operators.by_rows.apply_by_rows` as one operator, without dropout."""
    description = (visible.keys, visible.documents, visible.causal, visible.window)
    return forward(q, k, x, *description, scale)


@torch.library.custom_op("gfsa::attend_by_rows", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    x: Tensor,
    keys: Tensor | None,
    documents: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """The registered operator: ``A·x``."""
    visible = Visibility(keys, None, causal, window, documents)
    k, x = repeat_heads(k, q), repeat_heads(x, q)
    out = _empty_result(q, x)
    with no_autocast(q.device):
        for block in blocks(visible, q.shape[-2]):
            rows = attend_in_block(visible, block, *parts(block, q, k, x), 0.0, scale)
            out[..., block.start : block.stop, :] = rows
    return out


@torch.library.custom_op("gfsa::attend_by_rows_backward", mutates_args=())
def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    x: Tensor,
    keys: Tensor | None,
    documents: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and x."""
    visible = Visibility(keys, None, causal, window, documents)
    all_k, all_x = repeat_heads(k, q), repeat_heads(x, q)
    dq = _empty(q)
    # each block adds to the gradients of its keys: a sum that is rounded once
    dk, dx = (torch.zeros(y.shape, dtype=_sums(y), device=y.device) for y in (all_k, all_x))
    with no_autocast(q.device):
        for block in blocks(visible, q.shape[-2]):
            start, stop, first, last = block

            def attend(q: Tensor, k: Tensor, x: Tensor, block: Block = block) -> Tensor:
                return attend_in_block(visible, block, q, k, x, 0.0, scale)

            # autograd records nothing inside of an operator
            result: tuple[Any, ...] = torch.func.vjp(attend, *parts(block, q, all_k, all_x))
            of_q, of_k, of_x = result[1](g[..., start:stop, :])
            dq[..., start:stop, :] = of_q
            dk[..., first:last, :] += of_k
            dx[..., first:last, :] += of_x
    return dq, _of_shared_heads(dk, k), _of_shared_heads(dx, x)


@forward.register_fake
def _(q: Tensor, k: Tensor, x: Tensor, *_: Any) -> Tensor:
    return _empty_result(q, x)


@backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(q), _empty(k), _empty(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, x, keys, documents, *ctx.options = inputs
    ctx.save_for_backward(q, k, x, keys, documents)


def _differentiate(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    return (*backward(g, *ctx.saved_tensors, *ctx.options), None, None, None, None, None)


forward.register_autograd(_differentiate, setup_context=_save)


# contiguous, whatever the arguments are: the compiler is told the layout before anything has run


def _empty_result(q: Tensor, x: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:-1], x.shape[-1]))


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(like.shape)


def _sums(x: Tensor) -> torch.dtype:
    return at_least_float32(x.dtype)


def _of_shared_heads(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of heads that were repeated: the sum over the copies of each of them."""
    if gradient.shape != like.shape:
        gradient = gradient.unflatten(-3, (like.shape[-3], -1)).sum(-3)
    return gradient.to(like.dtype)
