"""Attention for tests: a reference in plain loops, random cases, and what a call dispatched."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# the operators every property is asked of
BACKENDS = ("dense", "sdpa")


def reference_map(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> np.ndarray:
    """The attention map by its definition, one row at a time, in float64: ``(..., H, N, N)``.

    A row without any key is a row of zeros. Nothing of the package is used here.
    """
    queries, keys = q.detach().double().numpy(), k.detach().double().numpy()
    length = queries.shape[-2]
    scale = 1 / math.sqrt(queries.shape[-1]) if scale is None else scale
    shape = (*queries.shape[:-1], length)
    allowed, bias = np.ones(shape, dtype=bool), np.zeros(shape)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = np.broadcast_to(attn_mask.numpy(), shape).copy()
    elif attn_mask is not None:
        bias = np.broadcast_to(attn_mask.detach().double().numpy(), shape)
    # each key head serves a run of neighbouring query heads
    group = queries.shape[-3] // keys.shape[-3] if queries.ndim > 2 else 1
    attention = np.zeros(shape)
    for index in np.ndindex(*shape[:-1]):
        *lead, row = index
        seen = list(lead)
        if seen:
            seen[-1] //= group
        scores = {}
        for column in range(length):
            score = scale * float(queries[index] @ keys[(*seen, column)])
            score += bias[(*index, column)]
            blocked = not allowed[(*index, column)] or (is_causal and column > row)
            if not blocked and score > -math.inf:
                scores[column] = score
        highest = max(scores.values(), default=0.0)
        total = sum(math.exp(score - highest) for score in scores.values())
        for column, score in scores.items():
            attention[(*index, column)] = math.exp(score - highest) / total
    return attention


def reference_filter(attention: np.ndarray, coeffs: Tensor) -> np.ndarray:
    """``H = Σ_k c_k A^k`` by powers of the matrix, head by head."""
    numbers = coeffs.detach().double().numpy()
    total = np.zeros_like(attention)
    for index in np.ndindex(*attention.shape[:-2]):
        row = numbers[index[-1]] if numbers.ndim == 2 else numbers
        for power, coefficient in enumerate(row):
            total[index] += coefficient * np.linalg.matrix_power(attention[index], power)
    return total


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor, enable_gqa: bool = False, **options: Any
) -> Tensor:
    """``y = H·v`` by the two above, in float64."""
    response = reference_filter(reference_map(q, k, **options), coeffs)
    values = v.detach().double().numpy()
    if values.ndim > 2:
        values = np.repeat(values, response.shape[-3] // max(values.shape[-3], 1), axis=-3)
    return torch.from_numpy(response @ values)


def published_form(
    q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor, is_causal: bool = False
) -> Tensor:
    """H built from powers of A in the tokens' dtype, then applied: how the formula is published."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    attention = scores.softmax(-1)
    power = torch.eye(q.shape[-2], dtype=q.dtype).expand_as(attention)
    response = coeffs[0].to(q.dtype) * power
    for coefficient in coeffs[1:].to(q.dtype):
        power = power @ attention
        response = response + coefficient * power
    return response @ v


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The largest difference, measured by the largest expected value."""
    if expected.numel() == 0:
        return 0.0
    difference = (got.double() - expected.double()).abs().max().item()
    return difference / max(expected.double().abs().max().item(), 1e-30)


@dataclass
class Case:
    """The arguments of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    coeffs: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.coeffs

    @property
    def leaves(self) -> list[Tensor]:
        """Everything a gradient reaches."""
        mask = self.options.get("attn_mask")
        additive = [mask] if mask is not None and mask.is_floating_point() else []
        return [*self.arguments, *additive]

    def requires_grad(self) -> Case:
        for leaf in self.leaves:
            leaf.requires_grad_()
        return self


def tokens(*shape: int, layout: str = "contiguous", dtype: torch.dtype = torch.float64) -> Tensor:
    """Random ``(..., H, N, D)``, laid out in memory as asked."""
    *lead, heads, length, dim = shape
    if layout == "projected":
        # what a linear layer gives: heads beside features, then transposed
        return torch.randn(*lead, length, heads, dim, dtype=dtype).transpose(-3, -2)
    if layout == "sliced":
        # a view whose last dimension has gaps
        return torch.randn(*lead, heads, length, 2 * dim, dtype=dtype)[..., ::2]
    return torch.randn(shape, dtype=dtype)


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype = torch.float64, max_length: int = 9) -> Case:
    """Shapes, masks, degrees, head groups, scales and memory layouts, in all combinations."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    batch = draw(st.sampled_from([(), (1,), (2,), (3,), (0,), (2, 2)]))
    length = draw(st.integers(0, max_length) | st.just(1))
    groups, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = groups * kv_heads
    dim = draw(st.integers(1, 8))
    # torch's fast kernels take values of the keys' dim
    value_dim = draw(st.just(dim) | st.integers(1, 8))
    layouts = st.sampled_from(["contiguous", "projected", "sliced"])
    degree = draw(st.integers(0, 4))
    per_head = draw(st.booleans())
    return Case(
        tokens(*batch, heads, length, dim, layout=draw(layouts), dtype=dtype),
        tokens(*batch, kv_heads, length, dim, layout=draw(layouts), dtype=dtype),
        tokens(*batch, kv_heads, length, value_dim, layout=draw(layouts), dtype=dtype),
        torch.randn((heads, degree + 1) if per_head else (degree + 1,), dtype=torch.float64),
        {
            "attn_mask": draw(masks((*batch, heads, length, length), dtype)),
            "is_causal": draw(st.booleans()),
            "scale": draw(st.sampled_from([None, 0.0, 0.3, -1.0, 2.0])),
            "enable_gqa": groups > 1 or draw(st.booleans()),
        },
    )


@st.composite
def masks(draw: st.DrawFn, scores: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """No mask, or one of any kind in any shape that broadcasts to the scores."""
    kind = draw(st.sampled_from(["none", "bool", "additive", "additive with -inf"]))
    if kind == "none":
        return None
    shape = scores[draw(st.integers(0, len(scores))) :]
    shape = tuple(1 if draw(st.booleans()) else size for size in shape)
    if kind == "bool":
        return torch.rand(shape) < 0.6
    mask = torch.randn(shape, dtype=dtype)
    if kind == "additive with -inf":
        mask = mask.masked_fill(torch.rand(shape) < 0.4, -math.inf)
    return mask


class Dispatched(TorchDispatchMode):
    """Records every kernel that runs inside and the size of the largest tensor that it made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(func.name())
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                self.largest = max(self.largest, made.numel())
        return result

    def count(self, part: str) -> int:
        return sum(part in name for name in self.names)
