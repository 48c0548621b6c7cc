"""Graph-filter self-attention as published, which builds the attention map and squares it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def published_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w0: Tensor,
    w1: Tensor,
    wK: Tensor,
    K: int = 3,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    r"""The formula of the paper, term by term, with its n×n matrices.

    .. math:: A = \mathrm{softmax}(q k^\top / \sqrt{d}), \qquad
              y = (w_0 I + w_1 A + w_K\,(A + (K-1)(A^2 - A)))\,v

    O(n³) time and several n×n matrices per head: the reference of the benchmarks.

    Args:
        q, k, v: ``(B, H, N, D)``.
        w0, w1, wK: ``(H,)``.
        K: order of the high-order term.
        is_causal: a token attends to itself and earlier tokens only.
        attn_mask: bool, True where a key takes part.
        dropout_p: share of the entries of A that is dropped, before A is squared.
    """
    n = q.shape[-2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if is_causal:
        future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    A = torch.dropout(scores.softmax(-1), dropout_p, train=True)
    identity = torch.eye(n, dtype=A.dtype, device=A.device)
    w0, w1, wK = (w.to(A.dtype)[:, None, None] for w in (w0, w1, wK))
    A_K = A + (K - 1) * (A @ A - A)
    return (w0 * identity + w1 * A + wK * A_K) @ v
