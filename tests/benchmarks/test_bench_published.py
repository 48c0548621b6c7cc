"""The published form is the formula, and gfsa computes the same without its matrices."""

import math

import pytest
import torch

import gfsa
from gfsa_benchmarks.published import published_attention


def tokens(heads=2, n=5, dim=3):
    return [torch.randn(1, heads, n, dim, dtype=torch.float64) for _ in range(3)]


def test_equals_the_formula_written_out_for_one_head():
    q, k, v = tokens(heads=1)
    w0, w1, wK, K = 0.3, 0.7, -0.2, 4
    n = q.shape[-2]
    A = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        row = [math.exp(float(q[0, 0, i] @ k[0, 0, j]) / math.sqrt(3)) for j in range(n)]
        for j in range(n):
            A[i, j] = row[j] / sum(row)
    square = sum(torch.outer(A[:, j], A[j]) for j in range(n))
    H = w0 * torch.eye(n, dtype=A.dtype) + w1 * A + wK * (A + (K - 1) * (square - A))
    weights = [torch.tensor([w], dtype=torch.float64) for w in (w0, w1, wK)]
    got = published_attention(q, k, v, *weights, K=K)
    torch.testing.assert_close(got[0, 0], H @ v[0, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_gfsa(is_causal):
    q, k, v = tokens()
    f = gfsa.GFSA(2, K=3, w0=[0.1, -0.3], w1=[0.8, 1.2], wK=[0.1, 0.4]).double()
    weights = [f.weights()[name] for name in ("w0", "w1", "wK")]
    expected = gfsa.graph_filter_attention(q, k, v, f.coefficients(), is_causal=is_causal)
    got = published_attention(q, k, v, *weights, K=3, is_causal=is_causal)
    # the filter's own parameters are float32 numbers
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
