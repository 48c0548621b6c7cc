"""The tracer finds the axes of heads and tokens whatever their sizes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import gfsa
from gfsa.plugs.tracing.adapter import TraceError
from support.plugging import disturb, matrix_polynomial
from support.written_attention import DIM, HEADS, B, Block, N, WrittenAttention, X, traced

FEW = torch.randn(B, DIM // HEADS, DIM, generator=torch.Generator().manual_seed(1))
"""As many tokens as a head has features."""


def test_as_many_tokens_as_features_are_distinguished():
    for way in ("matmul", "merged_heads", "joined"):
        check_by_definition(way, FEW)
    with pytest.raises(TraceError, match="over channels, not tokens"):
        traced("channels")(FEW)


SIZES = [(1, N), (2, N), (HEADS, N), (N, N), (3, HEADS), (HEADS, HEADS), (5, 1)]
"""Samples and tokens; some are as many as the heads, or as each other."""


def check_by_definition(way: str, *batches: Tensor) -> None:
    """A traced module equals ``Σ c_k A^k v``, computed for each sample and head by itself."""
    model = Block(way).double().eval()
    plain = copy.deepcopy(model)
    gfsa.plug(model, unknown="trace")
    (coefficients,) = disturb(model)
    for x in batches:
        x = x.double()
        with torch.no_grad():
            expected = x + defined(plain.attn, x, coefficients)
            torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)


def defined(attention: WrittenAttention, x: Tensor, coefficients: Tensor) -> Tensor:
    samples = []
    for sample in x:
        qkv = attention.qkv(sample).unflatten(-1, (3, HEADS, -1))
        heads = []
        for head in range(HEADS):
            q, k, v = qkv[:, :, head].unbind(1)
            matrix = (q @ k.mT * DIM**-0.5).softmax(-1)
            powers = [torch.linalg.matrix_power(matrix, p) for p in range(coefficients.shape[1])]
            total = sum(c * power for c, power in zip(coefficients[head], powers, strict=True))
            heads.append(total @ v)
        samples.append(attention.proj(torch.cat(heads, -1)))
    return torch.stack(samples)


LAID_OUT = [
    "matmul",
    "casts",
    "columns",
    "einsum",
    "merged_heads",
    "sdpa",
    "sdpa_merged",
    "head_axis_inside_windows",
    "joined",
    "joined_and_merged",
    "softmax_module",
    "heads_before_samples",
    "heads_before_samples_merged",
    "heads_before_samples_in_memory",
    "sdpa_heads_before_samples",
]


@pytest.mark.parametrize("way", LAID_OUT)
def test_the_axis_of_the_heads_is_kept_whatever_the_sizes(way):
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(b, n, DIM, generator=generator) for b, n in SIZES]
    check_by_definition(way, *batches)
    check_by_definition(way, *reversed(batches))
    for batch in batches:
        check_by_definition(way, batch, X)


@torch.no_grad()
def test_grouped_queries():
    model = Block("sdpa_with_groups").double().eval()
    attention = copy.deepcopy(model.attn)
    gfsa.plug(model, unknown="trace")
    (coefficients,) = disturb(model)
    for x in (X.double(), torch.randn(HEADS, N, DIM, dtype=torch.float64)):
        q, k, v = attention.qkv(x).unflatten(-1, (3, HEADS, -1)).movedim((2, 3), (0, 2))
        k, v = (y[:, ::2].repeat_interleave(2, 1) for y in (k, v))
        matrix = (q @ k.mT * DIM**-0.5).softmax(-1)
        y = matrix_polynomial(coefficients, matrix) @ v
        expected = x + attention.proj(y.transpose(1, 2).flatten(2))
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)


def test_an_empty_batch():
    for way in ("matmul", "merged_heads", "sdpa"):
        model = traced(way)
        assert model(X[:0]).shape == (0, N, DIM)
        assert model(X).isfinite().all()
        assert model(X[:0]).shape == (0, N, DIM)
