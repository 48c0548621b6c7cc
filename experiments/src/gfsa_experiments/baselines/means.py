"""The mean of the tokens that a query sees, as AttnScale and FeatScale take it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gfsa.operators import Visibility
from gfsa.operators.base import at_least_float32
from gfsa.operators.call import is_exporting

# the longest scan that torch's compiler keeps within one program of a GPU
CHUNK = 128


def mean_of_visible(visible: Visibility, x: Tensor, queries: int) -> Tensor:
    r""":math:`m_i = \frac{1}{|S_i|} \sum_{j \in S_i} x_j`, where query i sees the keys S_i.

    Args:
        x: ``(B, H, N, D)``.
        queries: the number of queries, the newest tokens if there are fewer than N.

    Returns:
        ``(B, H, queries or 1, D)`` in float32 at least; zeros for a query that sees no key.
    """
    dtype = at_least_float32(x.dtype)
    keys, pairs = visible.keys, visible.pairs
    if pairs is not None:
        # weights rather than a sum to divide, which could leave the range of float16
        weights = pairs.to(dtype) / pairs.sum(-1, keepdim=True).clamp(min=1)
        return (weights.to(x.dtype) @ x).to(dtype)
    described = visible.window is not None or visible.documents is not None
    if keys is not None and not described:
        x = x.masked_fill(~keys[..., None], 0.0)
    # torch's cumsum is not deterministic on a GPU
    if described or (visible.causal and torch.are_deterministic_algorithms_enabled()):
        weights = mean_matrix(visible, x.shape[-2], x)[..., x.shape[-2] - queries :, :]
        return (weights @ x).to(dtype)
    if visible.causal:
        mean = running_sum(x, dtype) / _counts_so_far(visible, x)
        return mean[..., x.shape[-2] - queries :, :]
    if keys is not None:
        count = keys[..., None].sum(-2, keepdim=True).clamp(min=1)
        return x.sum(-2, keepdim=True, dtype=dtype) / count
    return x.mean(-2, keepdim=True, dtype=dtype)


def _counts_so_far(visible: Visibility, x: Tensor) -> Tensor:
    """``(..., N, 1)``, how many keys a query of a causal layer sees, and 1 where it is none."""
    if visible.keys is not None:
        return running_sum(visible.keys[..., None], torch.int64).clamp(min=1)
    return torch.arange(1, x.shape[-2] + 1, device=x.device)[:, None]


def mean_matrix(visible: Visibility, length: int, like: Tensor) -> Tensor:
    """The matrix of the mean, ``(B or 1, H or 1, N, N)``: row i has ``1/|S_i|`` on S_i."""
    seen = visible.rows(0, length, length, like.device)
    seen = seen.expand(*seen.shape[:-2], length, length)
    seen = seen[(None,) * (4 - seen.dim())]
    dtype = at_least_float32(like.dtype)
    return (seen.to(dtype) / seen.sum(-1, keepdim=True).clamp(min=1)).to(like.dtype)


def seen_by_tokens(visible: Visibility) -> Visibility:
    """The visibility for tokens that are not split into heads: what some head sees."""
    if visible.mask is None or visible.mask.shape[-3] == 1:
        return visible
    keys = None if visible.keys is None else visible.keys.any(-2, keepdim=True)
    pairs = None if visible.pairs is None else visible.pairs.any(-3, keepdim=True)
    options = (visible.causal, visible.window, visible.documents, visible.in_order)
    return Visibility(keys, pairs, *options)


def running_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    r"""``x.cumsum(-2, dtype=dtype)``, :math:`s_i = \sum_{j \le i} x_j` over the tokens.

    The compiler splits longer scans between programs where there are few of them, and cannot fuse
    such a scan with an operand that has no token axis (a factor per head or channel): up to torch
    2.11 it ends with a TypeError (https://github.com/pytorch/pytorch/issues/180221), in the forward
    or in the gradient. Compiled models therefore sum chunk by chunk.

    Args:
        x: ``(..., N, D)``.
    """
    # an exported program has one form for all lengths
    if not torch.compiler.is_compiling() or is_exporting():
        return x.cumsum(-2, dtype=dtype)
    return sum_by_chunks(x, dtype)


def sum_by_chunks(x: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`running_sum` by scans of at most :data:`CHUNK` tokens."""
    tokens = x.shape[-2]
    if tokens <= CHUNK:
        return x.cumsum(-2, dtype=dtype)
    filled = F.pad(x, (0, 0, 0, -tokens % CHUNK))
    within = filled.unflatten(-2, (-1, CHUNK)).cumsum(-2, dtype=dtype)
    whole = sum_by_chunks(within[..., -1, :], dtype)
    before = F.pad(whole[..., :-1, :], (0, 0, 1, 0))
    return (within + before[..., None, :]).flatten(-3, -2)[..., :tokens, :]
