"""The entropy of attention maps, computed in blocks of rows: the whole map is never in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gfsa.lens.spectrum import dense_map
from gfsa.operators import AttentionOperator, DenseOperator, LinearOperator, Operator, SDPAOperator
from gfsa.operators.base import at_least_float32, repeat_heads

# entries of the map in memory at a time: 64 MB in float32
_ENTRIES = 1 << 24


def attention_entropy(
    operator: Operator, v: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Mean entropy of the rows of an attention map, in nats and as a share of its maximum.

    .. math:: h_i = -\sum_j A_{ij} \log A_{ij}, \qquad \frac{h_i}{\log m_i}

    where token i may attend to :math:`m_i` tokens (i of them in a causal model). A share of 1 is
    uniform attention, 0 is one-hot. Rows that see a single token have no share and are left out of
    its mean. Rows that do not sum to one are normalised first. O(N²·D) time, as one attention pass,
    and bounded memory.

    Returns:
        Nats and share, each ``(..., heads)``.
    """
    # autocast would round the scores to bfloat16, whatever the type of q and k here
    with torch.autocast(v.device.type, enabled=False):
        return _means(operator, v, valid)


def _means(operator: Operator, v: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    nats = shares = counts = counts_shared = torch.zeros((), device=v.device)
    for start, entropy, allowed in _row_entropies(operator, v):
        counted = torch.ones_like(entropy).masked_fill(entropy.isnan(), 0.0)
        if valid is not None:
            counted = counted * valid[..., None, start : start + entropy.shape[-1]]
        entropy = entropy.nan_to_num(0.0)
        most = allowed.to(entropy.dtype).sum(-1).expand(entropy.shape)
        shared = counted * (most > 1)
        nats = nats + (entropy * counted).sum(-1)
        shares = shares + (entropy * shared / most.clamp_min(2).log()).sum(-1)
        counts = counts + counted.sum(-1)
        counts_shared = counts_shared + shared.sum(-1)
    return _ratio(nats, counts), _ratio(shares, counts_shared)


def has_rows(operator: Operator) -> bool:
    """Whether the map can be computed in blocks of rows, or the operator already holds it."""
    kinds = (AttentionOperator, SDPAOperator, LinearOperator, DenseOperator)
    return isinstance(operator, kinds) or hasattr(operator, "weights")


def _ratio(total: Tensor, count: Tensor) -> Tensor:
    return torch.where(count > 0, total / count, math.nan)


def _row_entropies(operator: Operator, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields a block's first row, its entropies ``(..., H, n)`` and which entries are not masked.

    The entropy of a row of zeros is NaN.
    """
    if isinstance(operator, (AttentionOperator, SDPAOperator)):
        yield from _softmax_entropies(operator)
        return
    if isinstance(operator, LinearOperator):
        columns, visible = operator.columns.mT, operator.visibility()
        length = columns.shape[-1]
        for start, stop in _spans(operator.rows.shape[:-1], length):
            allowed = visible.rows(start, stop, length, columns.device)
            yield start, _entropy(operator.rows[..., start:stop, :] @ columns), allowed
        return
    matrix = operator.matrix if isinstance(operator, DenseOperator) else dense_map(operator, v)
    matrix = matrix.to(at_least_float32(matrix.dtype))
    for start, stop in _spans(matrix.shape[:-1], matrix.shape[-1]):
        rows = matrix[..., start:stop, :]
        yield start, _entropy(rows), rows > 0


def _entropy(rows: Tensor) -> Tensor:
    """The entropy of rows divided by their sums, without dividing them."""
    total = rows.sum(-1)
    entropy = torch.special.entr(rows).sum(-1) / total + total.log()
    return torch.where(total > 0, entropy, math.nan)


def _softmax_entropies(
    operator: AttentionOperator | SDPAOperator,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    r"""From the scores s: :math:`h = \mathrm{LSE}(s) - \langle \mathrm{softmax}(s), s\rangle`."""
    call, visible = operator.call, operator.visibility()
    q, mask = call.q, call.attn_mask
    dtype = at_least_float32(q.dtype)
    k = repeat_heads(call.k, q).to(dtype).mT
    scale = 1 / math.sqrt(q.shape[-1]) if call.scale is None else call.scale
    masked = mask is not None or call.is_causal or call.visible is not None
    for start, stop in _spans(q.shape[:-1], k.shape[-1]):
        scores = (q[..., start:stop, :].to(dtype) * scale) @ k
        allowed = visible.rows(start, stop, k.shape[-1], q.device)
        if mask is not None and mask.dtype != torch.bool:
            broadcast = mask.dim() < 2 or mask.shape[-2] == 1
            scores = scores + (mask if broadcast else mask[..., start:stop, :])
        if masked:
            scores = scores.masked_fill(~allowed, -math.inf)
        # the highest score is subtracted in place: these are the largest tensors here
        scores -= scores.amax(-1, keepdim=True).clamp_min(torch.finfo(dtype).min)
        weights = scores.exp()
        if masked:
            # 0·(-inf) is NaN; with any finite score the product is the 0 that is needed
            scores.masked_fill_(~allowed, 0.0)
        total = weights.sum(-1)
        entropy = total.log() - torch.linalg.vecdot(weights, scores) / total
        yield start, torch.where(allowed.any(-1), entropy, math.nan), allowed


def _spans(rows: torch.Size, width: int) -> Iterator[tuple[int, int]]:
    length = rows[-1]
    others = math.prod(rows[:-1])
    step = max(1, _ENTRIES // max(1, others * width))
    for start in range(0, length, step):
        yield start, min(start + step, length)
