"""Sums over a token and those before it, in a form that compiled models can have on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gfsa.operators.exporting import is_exporting

# the longest scan that torch's compiler keeps within one program of a GPU
CHUNK = 128


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
