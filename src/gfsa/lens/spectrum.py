"""The frequency response of an attention map and of its filter.

There are two responses, and names always say which is meant: the response on the *Fourier modes* of
the token sequence, and the response on the *singular values* of the map.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from gfsa.lens.metrics import singular_values
from gfsa.operators import Operator, combine
from gfsa.operators.base import at_least_float32, repeat_heads

Verdict = Literal["low-pass", "high-pass", "all-pass", "mixed"]


def frequency_grid(length: int, most: int = 33) -> Tensor:
    """Frequencies in cycles per token from 0 to 1/2, at most ``most``, for ``length`` tokens."""
    return torch.linspace(0, 0.5, min(length // 2 + 1, most), dtype=torch.float64)


def frequency_response(
    operator: Operator,
    v: Tensor,
    coeffs: Tensor,
    valid: Tensor | None,
    frequencies: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""Gain of the attention map and of its filter on each Fourier mode of the token sequence.

    .. math:: r_A(f) = \frac{\|A φ_f\|}{\|φ_f\|}, \qquad r_H(f) = \frac{\|H φ_f\|}{\|φ_f\|},
              \qquad φ_f(t) = e^{2πift}, \; H = \sum_k c_k A^k

    A sample of n valid tokens has the modes f = 0, 1/n, …, ½; for each requested frequency the
    nearest mode is used, so that modes are orthogonal for every length. Costs ``degree · 2F / D``
    attention passes for F frequencies and head dim D; no n×n matrix is built.

    Args:
        operator: the map A.
        v: the values of the layer, ``(..., H, N, D)``: their shape, dtype and device are used.
        coeffs: ``(heads, degree+1)``.
        valid: ``(..., N)`` or None.
        frequencies: ``(F,)``.

    Returns:
        ``r_A`` and ``r_H``, each ``(..., heads, F)``.
    """
    modes = fourier_modes(v.shape[:-3], v.shape[-2], valid, frequencies.to(v.device))
    keep = 1.0 if valid is None else valid[..., None, :, None].double()
    size = modes.square().sum(-2).unflatten(-1, (-1, 2)).sum(-1)[..., None, :]
    gains: list[list[Tensor]] = [[], []]
    for block in _blocks(modes, v):
        powers = operator.powers(block, max(coeffs.shape[-1] - 1, 1))
        spread = [repeat_heads(power, powers[1]).double() for power in powers]
        filtered = combine(coeffs.double(), spread[: coeffs.shape[-1]])
        for gain, output in zip(gains, (spread[1], filtered), strict=True):
            gain.append((output * keep).square().sum(-2))
    energy = [
        torch.cat(g, -1)[..., : modes.shape[-1]].unflatten(-1, (-1, 2)).sum(-1) for g in gains
    ]
    return (energy[0] / size).sqrt(), (energy[1] / size).sqrt()


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

    An operator that cannot return its matrix is applied to the identity, D columns at a time, in
    N/D passes.
    """
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


def polynomial(coeffs: Tensor, values: Tensor) -> Tensor:
    r"""``p(σ) = Σ_k c_k σ^k``: coefficients ``(..., m+1)`` at values ``(..., S)``."""
    result = torch.zeros_like(values)
    for column in reversed(coeffs.unbind(-1)):
        result = result * values + column[..., None]
    return result


def verdict(coeffs: Tensor) -> Verdict:
    r"""Low-pass or high-pass, by the criterion of Theorem 3.1 of the paper.

    .. math:: |g(σ)| < |g(1)| \;\; ∀\, σ \in (0, 1): \text{low-pass}, \qquad
              |g(σ)| > |g(1)| \;\; ∀\, σ \in (0, 1): \text{high-pass}

    with :math:`g(σ) = \sum_k c_k σ^k`. Decided by the roots of :math:`g(σ) = \pm g(1)`, not on a
    grid. Neither is "mixed"; a constant g is "all-pass".

    Args:
        coeffs: ``(degree+1,)``, one head.
    """
    numbers = coeffs.detach().double().cpu()
    at_one = float(numbers.sum())
    edges = [0.0, 1.0]
    for level in (at_one, -at_one):
        shifted = numbers.clone()
        shifted[0] -= level
        edges += [root for root in _real_roots(shifted) if 0 < root < 1]
    edges.sort()
    scale = max(float(numbers.abs().sum()), 1e-30)
    signs = set()
    for left, right in pairwise(edges):
        # roots that differ by rounding are the same root
        if right - left < 1e-6:
            continue
        middle = torch.tensor([(left + right) / 2], dtype=torch.float64)
        difference = abs(float(polynomial(numbers, middle))) - abs(at_one)
        signs.add(0 if abs(difference) < 1e-12 * scale else int(math.copysign(1, difference)))
    if signs == {0}:
        return "all-pass"
    if signs == {-1}:
        return "low-pass"
    return "high-pass" if signs == {1} else "mixed"


def _real_roots(numbers: Tensor) -> list[float]:
    """Real roots of ``Σ_k numbers[k]·x^k``: eigenvalues of its companion matrix."""
    used = numbers.abs() > 1e-14 * numbers.abs().max()
    degree = int(used.nonzero().max()) if bool(used.any()) else 0
    if degree == 0:
        return []
    companion = torch.diag(torch.ones(degree - 1, dtype=torch.float64), -1)
    companion[:, -1] = -numbers[:degree] / numbers[degree]
    roots = torch.linalg.eigvals(companion)
    return [float(r.real) for r in roots if abs(float(r.imag)) < 1e-7]


def _blocks(columns: Tensor, v: Tensor) -> list[Tensor]:
    """``(..., N, C)`` split into tensors of v's shape, padded with zeros, for any kernel."""
    width = v.shape[-1]
    missing = -columns.shape[-1] % width
    columns = torch.nn.functional.pad(columns.to(v.dtype), (0, missing))
    return [
        part[..., None, :, :].expand(v.shape).contiguous() for part in columns.split(width, dim=-1)
    ]
