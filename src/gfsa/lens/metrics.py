"""Metrics of oversmoothing: how similar the tokens of a sample are, without its padding.

Every function takes tokens ``x`` of shape ``(..., N, D)`` and ``valid`` of shape ``(..., N)``
(True where a token counts; None: all do) and returns a number for each leading index. An undefined
number (the similarity of a single token, say) is NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfsa.operators.base import at_least_float32


def cosine_similarity(x: Tensor, valid: Tensor | None = None) -> Tensor:
    r"""Mean cosine similarity of all pairs of tokens, in O(N·D).

    .. math:: \frac{1}{n(n-1)} \sum_{i \ne j} \hat x_i^\top \hat x_j
              = \frac{\|\sum_i \hat x_i\|^2 - n}{n^2 - n}, \qquad \hat x = x / \|x\|

    1: all tokens have the same direction; 0: no direction in common. A token of zeros has no
    direction; its similarity to every token counts as 0.
    """
    x = _only(x, valid)
    norms = torch.linalg.vector_norm(x, dim=-1)
    directed = norms > 0
    weights = torch.where(directed, 1 / norms, 0.0)
    total = (weights[..., None, :] @ x).squeeze(-2)
    similar = total.square().sum(-1) - directed.sum(-1)
    count = _count(x, valid)
    pairs = count * count - count
    return torch.where(pairs > 0, similar / pairs, math.nan)


def rank_one_residual(x: Tensor, valid: Tensor | None = None) -> Tensor:
    r"""The relative distance of the tokens from the mean token.

    .. math:: \frac{\min_m \|X - 1 m^\top\|_F}{\|X\|_F} = \frac{\|X - 1 \bar x^\top\|_F}{\|X\|_F}

    0: all tokens are the same vector; 1: their mean is zero. Dong et al. (2021) show that attention
    alone drives it to 0 doubly exponentially; they use another norm.
    """
    x = _only(x, valid)
    mean = x.sum(-2, keepdim=True) / _count(x, valid)[..., None, None]
    # not computed as ‖X‖² − n‖x̄‖², which cancels when the tokens have collapsed
    residual = _only(x - mean, valid)
    size = torch.linalg.vector_norm(x, dim=(-2, -1))
    return torch.where(size > 0, torch.linalg.vector_norm(residual, dim=(-2, -1)) / size, math.nan)


def token_norm(x: Tensor, valid: Tensor | None = None) -> Tensor:
    r"""Mean length of a token, :math:`\frac1n \sum_i \|x_i\|_2`."""
    norms = torch.linalg.vector_norm(_only(x, valid), dim=-1)
    return norms.sum(-1) / _count(x, valid)


def singular_values(x: Tensor, valid: Tensor | None = None) -> Tensor:
    r"""Singular values of the ``n×D`` matrix of tokens, largest first: ``(..., min(N, D))``.

    They are the roots of the eigenvalues of the smaller of :math:`XX^\top` and :math:`X^\top X`,
    in float64: small ones are accurate to 1e-8 of the largest. Padding rows count as zeros and add
    zeros at the end.
    """
    x = _only(x, valid).double()
    gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
    return torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().flip(-1)


def effective_rank(values: Tensor) -> Tensor:
    r"""Effective rank (Roy and Vetterli, 2007) from singular values ``(..., r)``.

    .. math:: \exp\Big(-\sum_i p_i \log p_i\Big), \qquad p_i = \sigma_i / \sum_j \sigma_j

    Between 1 (one direction) and the number of tokens or features, whichever is smaller.
    """
    total = values.sum(-1, keepdim=True)
    entropy = torch.special.entr(values / total).sum(-1)
    return torch.where(total.squeeze(-1) > 0, entropy.exp(), math.nan)


def singular_profile(values: Tensor, rank: Tensor, points: int) -> Tensor:
    r"""Singular values on a common axis, so that samples of different lengths can be averaged.

    .. math:: s(u) = \sigma_{1 + \mathrm{round}(u (r - 1))} / \sigma_1, \qquad u \in [0, 1]

    Args:
        values: ``(..., R)``, largest first.
        rank: ``(...)``: r, the largest rank of a sample of this size.
        points: the number of evenly spaced u.
    """
    u = torch.linspace(0, 1, points, dtype=values.dtype, device=values.device)
    last = (rank.clamp_min(1) - 1).to(values.dtype)
    index = (last[..., None] * u).round().long()
    return values.gather(-1, index) / values[..., :1]


def dirichlet_energy(x: Tensor, smoothed: Tensor, valid: Tensor | None = None) -> Tensor:
    r"""Dirichlet energy of tokens on the attention graph, as a share of their size.

    .. math:: E_A(x) = \frac{\|x\|^2 - \langle x, A x\rangle}{\|x\|^2}

    0: neighbours on the graph have the same vector; 1: a token and its neighbours are orthogonal.
    Only the symmetric part of A matters. With A = 11ᵀ/n it is the square of
    :func:`rank_one_residual`.

    Args:
        x: ``(..., N, D)``.
        smoothed: ``A·x``.
    """
    x, smoothed = _only(x, valid), _only(smoothed, valid)
    size = x.square().sum((-2, -1))
    return torch.where(size > 0, 1 - (x * smoothed).sum((-2, -1)) / size, math.nan)


def token_count(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """How many tokens count, ``(...)``."""
    return _count(x, valid).long()


def _count(x: Tensor, valid: Tensor | None) -> Tensor:
    dtype = at_least_float32(x.dtype)
    if valid is None:
        return torch.full(x.shape[:-2], float(x.shape[-2]), dtype=dtype, device=x.device)
    return valid.to(dtype).sum(-1).expand(x.shape[:-2])


def _only(x: Tensor, valid: Tensor | None) -> Tensor:
    """The tokens with those that do not count set to zero, in float32 at least."""
    x = x.to(at_least_float32(x.dtype))
    # torch.where, not a product: padding may contain NaN
    return x if valid is None else torch.where(valid[..., None], x, 0.0)
