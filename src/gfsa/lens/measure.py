"""The measurements: how alike tokens are, how sharp attention is, which frequencies pass.

Functions of tokens take ``x (..., N, D)`` and ``valid (..., N)`` (True where a token counts; None:
all do) and return a number for each leading index. An undefined number (the similarity of a single
token, say) is NaN.

There are two frequency responses, and names always say which is meant: the response on the *Fourier
modes* of the token sequence, and the response on the *singular values* of the map.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfsa.lens.readings import Verdict
from gfsa.operators import DenseOperator, Operator, SDPAOperator, combine
from gfsa.operators.call import no_autocast
from gfsa.operators.operator import at_least_float32, repeat_heads


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
    count = token_count(x, valid)
    pairs = count * count - count
    return torch.where(pairs > 0, similar / pairs, math.nan)


def rank_one_residual(x: Tensor, valid: Tensor | None = None) -> Tensor:
    r"""The relative distance of the tokens from the mean token (Dong et al., 2021, another norm).

    .. math:: \|X - 1 \bar x^\top\|_F \,/\, \|X\|_F

    0: all tokens are the same vector; 1: their mean is zero.
    """
    x = _only(x, valid)
    mean = x.sum(-2, keepdim=True) / token_count(x, valid)[..., None, None]
    # not computed as ‖X‖² − n‖x̄‖², which cancels when the tokens have collapsed
    residual = _only(x - mean, valid)
    size = torch.linalg.vector_norm(x, dim=(-2, -1))
    return torch.where(size > 0, torch.linalg.vector_norm(residual, dim=(-2, -1)) / size, math.nan)


def token_norm(x: Tensor, valid: Tensor | None = None) -> Tensor:
    r"""Mean length of a token, :math:`\frac1n \sum_i \|x_i\|_2`."""
    norms = torch.linalg.vector_norm(_only(x, valid), dim=-1)
    return norms.sum(-1) / token_count(x, valid)


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

    Between 1 (one direction) and the smaller of the numbers of tokens and features.
    """
    total = values.sum(-1, keepdim=True)
    entropy = torch.special.entr(values / total).sum(-1)
    return torch.where(total.squeeze(-1) > 0, entropy.exp(), math.nan)


def singular_profile(values: Tensor, rank: Tensor, points: int) -> Tensor:
    r"""Singular values on a common axis, so that samples of different lengths can be averaged.

    .. math:: s(u) = \sigma_{1 + \mathrm{round}(u (r - 1))} / \sigma_1, \qquad u \in [0, 1]

    for ``points`` evenly spaced u, from values ``(..., R)``, largest first, and the largest rank r
    of a sample of this size, ``(...)``.
    """
    u = torch.linspace(0, 1, points, dtype=values.dtype, device=values.device)
    last = (rank.clamp_min(1) - 1).to(values.dtype)
    index = (last[..., None] * u).round().long()
    return values.gather(-1, index) / values[..., :1]


def dirichlet_energy(x: Tensor, smoothed: Tensor, valid: Tensor | None = None) -> Tensor:
    r"""Dirichlet energy of tokens on the attention graph, as a share of their size.

    .. math:: E_A(x) = \frac{\|x\|^2 - \langle x, A x\rangle}{\|x\|^2}

    ``smoothed`` is A·x. 0: neighbours on the graph have the same vector; 1: a token and its
    neighbours are orthogonal. With A = 11ᵀ/n it is the square of :func:`rank_one_residual`.
    """
    x, smoothed = _only(x, valid), _only(smoothed, valid)
    size = x.square().sum((-2, -1))
    return torch.where(size > 0, 1 - (x * smoothed).sum((-2, -1)) / size, math.nan)


def token_count(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """How many tokens count, ``(...)``."""
    if valid is None:
        return torch.full(x.shape[:-2], x.shape[-2], device=x.device)
    return valid.sum(-1).expand(x.shape[:-2])


def _only(x: Tensor, valid: Tensor | None) -> Tensor:
    """The tokens with those that do not count set to zero, in float32 at least."""
    x = x.to(at_least_float32(x.dtype))
    # torch.where, not a product: padding may contain NaN
    return x if valid is None else torch.where(valid[..., None], x, 0.0)


def frequency_grid(length: int, most: int = 33) -> Tensor:
    """Frequencies in cycles per token from 0 to 1/2, at most ``most``, for ``length`` tokens."""
    return torch.linspace(0, 0.5, min(length // 2 + 1, most), dtype=torch.float64)


def frequency_response(
    operator: Operator,
    v: Tensor,
    coeffs: Tensor,
    valid: Tensor | None,
    frequencies: Tensor,
    own: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Gain of the attention map and of its filter on each Fourier mode of the token sequence.

    .. math:: r_A(f) = \frac{\|A φ_f\|}{\|φ_f\|}, \qquad r_H(f) = \frac{\|H φ_f\|}{\|φ_f\|},
              \qquad φ_f(t) = e^{2πift}, \; H = \sum_k c_k A^k - diag(a\,p)

    A sample of n valid tokens has the modes f = 0, 1/n, …, ½; for each requested frequency the
    nearest mode is used, so that modes are orthogonal for every length. Costs ``degree · 2F / D``
    attention passes for F frequencies and head dim D; no n×n matrix is built.

    Of the values v only shape, dtype and device are used; ``own`` is a·p of the exclusive term,
    ``(..., heads, N, 1)``. Returns ``r_A`` and ``r_H``, each ``(..., heads, F)``.
    """
    modes = fourier_modes(v.shape[:-3], v.shape[-2], valid, frequencies.to(v.device))
    keep = 1.0 if valid is None else valid[..., None, :, None].double()
    size = modes.square().sum(-2).unflatten(-1, (-1, 2)).sum(-1)[..., None, :]
    gains = []
    for block in _blocks(modes, v):
        powers = operator.powers(block, max(coeffs.shape[-1] - 1, 1))
        spread = [repeat_heads(power, powers[1]).double() for power in powers]
        filtered = combine(coeffs.double(), spread[: coeffs.shape[-1]])
        if own is not None:
            filtered = filtered - own * spread[0]
        outputs = torch.stack((spread[1], filtered))
        gains.append((outputs * keep).square().sum(-2))
    energy = torch.cat(gains, -1)[..., : modes.shape[-1]].unflatten(-1, (-1, 2)).sum(-1)
    on_map, on_filter = (energy / size).sqrt().unbind()
    return on_map, on_filter


def fourier_modes(
    lead: tuple[int, ...], length: int, valid: Tensor | None, frequencies: Tensor
) -> Tensor:
    """``(*lead, N, 2F)``: cosine and sine of each frequency, adjacent; zero where not ``valid``."""
    if valid is None:
        valid = torch.ones(*lead, length, dtype=torch.bool, device=frequencies.device)
    valid = valid.expand(*lead, length)
    count = valid.sum(-1, keepdim=True).double()
    # the position among the valid tokens, and the nearest mode with a whole number of periods
    position = (valid.cumsum(-1) - 1).double()
    whole = (frequencies.double() * count).round().clamp(max=(count // 2))
    angle = 2 * math.pi * position[..., :, None] * (whole / count.clamp_min(1))[..., None, :]
    modes = torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)
    return torch.where(valid[..., None], modes, 0.0)


def dense_map(operator: Operator, v: Tensor) -> Tensor:
    """The map as a matrix ``(..., heads, N, N)`` in float32 at least.

    Torch's kernels would round it to the dtype of v. Another operator that cannot return its matrix
    is applied to the identity, D columns at a time, in N/D passes.
    """
    with no_autocast(v.device):
        if isinstance(operator, SDPAOperator):
            operator = DenseOperator.from_call(operator.call)
        try:
            matrix = operator.dense()
        except TypeError:
            identity = torch.eye(v.shape[-2], device=v.device, dtype=torch.float64)
            columns = identity.expand(*v.shape[:-3], *identity.shape)
            parts = [operator.apply(block) for block in _blocks(columns, v)]
            matrix = torch.cat(parts, -1)[..., : v.shape[-2]]
    return matrix.to(at_least_float32(matrix.dtype))


def map_singular_values(matrix: Tensor, valid: Tensor | None = None) -> Tensor:
    """Singular values of maps ``(..., H, N, N)`` on their valid tokens, largest first, to 1e-8."""
    if valid is not None:
        keep = valid[..., None, :, None] & valid[..., None, None, :]
        matrix = torch.where(keep, matrix, 0.0)
    return singular_values(matrix)


def verdicts(coeffs: Tensor) -> list[Verdict]:
    r"""Low-pass or high-pass, head by head, by the criterion of Theorem 3.1 of the paper.

    .. math:: |g(σ)| < |g(1)| \;\; ∀\, σ \in (0, 1): \text{low-pass}, \qquad
              |g(σ)| > |g(1)| \;\; ∀\, σ \in (0, 1): \text{high-pass}

    with :math:`g(σ) = \sum_k c_k σ^k`. Neither is "mixed"; a constant g is "all-pass". The grid of
    σ is so fine at both ends that a crossing 1e-6 from them is seen.
    """
    numbers = coeffs.detach().double().cpu()
    sigma = torch.linspace(0, math.pi / 2, 4097, dtype=torch.float64)[1:-1].sin().square()
    powers = sigma ** torch.arange(numbers.shape[-1])[:, None]
    differences = (numbers @ powers).abs() - numbers.sum(-1, keepdim=True).abs()
    noise = 1e-12 * numbers.abs().sum(-1, keepdim=True)
    is_less, is_more = (differences < -noise).any(-1), (differences > noise).any(-1)
    # in the order of what is true of a head: neither, more, less, both
    names: list[Verdict] = ["all-pass", "high-pass", "low-pass", "mixed"]
    return [names[2 * less + more] for less, more in zip(is_less, is_more, strict=True)]


def _blocks(columns: Tensor, v: Tensor) -> list[Tensor]:
    """``(..., N, C)`` split into tensors of v's shape, padded with zeros, for any kernel."""
    width = v.shape[-1]
    missing = -columns.shape[-1] % width
    columns = torch.nn.functional.pad(columns.to(v.dtype), (0, missing))
    return [
        part[..., None, :, :].expand(v.shape).contiguous() for part in columns.split(width, dim=-1)
    ]


def attention_entropy(
    matrix: Tensor, visible: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Mean entropy of the rows of attention maps, in nats and as a share of its maximum.

    .. math:: h_i = -\sum_j A_{ij} \log A_{ij}, \qquad \frac{h_i}{\log m_i}

    where token i may attend to :math:`m_i` tokens (i of them in a causal model). A share of 1 is
    uniform attention, 0 is one-hot. Rows that see a single token have no share and are left out of
    its mean. Rows that do not sum to one are normalised first.

    Args:
        matrix: ``(..., heads, N, N)``.
        visible: which entries are not masked, to be broadcast; default: those above 0.
        valid: ``(..., N)``.

    Returns:
        Nats and share, each ``(..., heads)``.
    """
    # of rows divided by their sums, without dividing them
    total = matrix.sum(-1)
    counted = total > 0
    entropy = torch.special.entr(matrix).sum(-1) / total + total.log()
    if valid is not None:
        counted = counted & valid[..., None, :]
    most = (matrix > 0 if visible is None else visible).sum(-1).expand(entropy.shape)
    share = entropy / most.clamp_min(2).log()
    return _mean_where(entropy, counted), _mean_where(share, counted & (most > 1))


def _mean_where(x: Tensor, counted: Tensor) -> Tensor:
    """The mean over the last axis of what counts; NaN of nothing."""
    return torch.where(counted, x, math.nan).nanmean(-1)
