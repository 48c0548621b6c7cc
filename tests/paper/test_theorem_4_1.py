r"""Theorem 4.1 of the paper: how far the extrapolated power is from the true one.

.. math:: E_K = \|A^K - (A + (K-1)(A^2 - A))\|_F \le 2\sqrt{n}\,K

The bound holds for every row-stochastic map, by the triangle inequality and ‖A^k‖_F ≤ √n. (The
paper's step ‖A^K‖_F ≤ ‖A‖_F is not true of every such map, as tested below, and not needed.)
It says little about closeness: √n is as large as ‖A^K‖_F can be, so an error of twice the power's
own size is within it from K = 1. On random attention the relative error grows with K beyond
100 %: what is extrapolated is a filter in its own right, not an approximation.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gfsa import GFSA
from gfsa.operators import DenseOperator


def extrapolated(A: Tensor, K: int) -> Tensor:
    """The package's own high-order term, and nothing else: w0 = w1 = 0, wK = 1."""
    filter = GFSA(1, K=K, learn=(), w0=0.0, w1=0.0, wK=1.0).double()
    return DenseOperator(A[None]).filter(filter.coefficients())[0]


def error(A: Tensor, K: int) -> Tensor:
    return torch.linalg.matrix_norm(torch.linalg.matrix_power(A, K) - extrapolated(A, K))


def random_attention(n: int, sharpness: float = 1.0, dim: int = 64) -> Tensor:
    q, k = torch.randn(2, n, dim, dtype=torch.float64)
    return (sharpness * q @ k.T / dim**0.5).softmax(-1)


@st.composite
def attention_maps(draw) -> Tensor:
    torch.manual_seed(draw(st.integers(0, 2**16)))
    n = draw(st.integers(1, 40))
    kind = draw(st.sampled_from(["random", "sharp", "one-hot", "permutation", "uniform", "star"]))
    if kind in ("random", "sharp"):
        return random_attention(n, 1.0 if kind == "random" else 20.0)
    if kind == "one-hot":
        return torch.eye(n, dtype=torch.float64)[torch.randint(n, (n,))]
    if kind == "permutation":
        return torch.eye(n, dtype=torch.float64)[torch.randperm(n)]
    if kind == "uniform":
        return torch.full((n, n), 1 / n, dtype=torch.float64)
    # every token looks at the first one, which looks at everybody
    star = torch.eye(n, dtype=torch.float64)[torch.zeros(n, dtype=torch.long)]
    star[0] = 1 / n
    return star


@given(attention_maps(), st.integers(2, 20))
def test_error_bound(A: Tensor, K: int) -> None:
    assert error(A, K) <= 2 * math.sqrt(len(A)) * K


@given(attention_maps())
def test_the_second_power_is_exact(A: Tensor) -> None:
    assert error(A, 2) <= 1e-12 * len(A)


@given(attention_maps(), st.integers(2, 20))
def test_powers_stay_within_what_the_bound_needs(A: Tensor, K: int) -> None:
    power = torch.linalg.matrix_power(A, K)
    torch.testing.assert_close(power.sum(-1), torch.ones(len(A)).double())
    assert torch.linalg.matrix_norm(power) <= math.sqrt(len(A)) + 1e-9


def test_the_norm_of_a_power_can_grow() -> None:
    """Walking on, tokens gather at the first one, which looks at itself: ‖A²‖ > ‖A‖."""
    A = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.5, 0.5, 0]], dtype=torch.float64)
    assert torch.linalg.matrix_norm(A @ A) > torch.linalg.matrix_norm(A)


def test_uniform_attention_is_its_own_power() -> None:
    A = torch.full((16, 16), 1 / 16, dtype=torch.float64)
    assert error(A, 10) <= 1e-12


def test_a_permutation_comes_nearest_the_bound() -> None:
    """A cycle has no two equal powers, so nothing cancels: E_K = √(n·(1 + (K−2)² + (K−1)²))."""
    A = torch.eye(32, dtype=torch.float64).roll(1, 0)
    for K in (3, 5, 10):
        expected = math.sqrt(32 * (1 + (K - 2) ** 2 + (K - 1) ** 2))
        assert error(A, K).item() == pytest.approx(expected)


def test_relative_error_on_random_attention_grows_beyond_the_power_itself() -> None:
    """About 126 % at K = 3 and 980 % at K = 10 (n = 64, q and k standard normal; a mean)."""
    relative = {K: [] for K in (3, 4, 6, 10)}
    for _ in range(20):
        A = random_attention(64)
        for K, found in relative.items():
            size = torch.linalg.matrix_norm(torch.linalg.matrix_power(A, K))
            found.append((error(A, K) / size).item())
    means = {K: sum(found) / len(found) for K, found in relative.items()}
    assert means[3] < means[4] < means[6] < means[10]
    assert means[3] == pytest.approx(1.26, rel=0.1)
    assert means[10] == pytest.approx(9.8, rel=0.1)


@pytest.mark.parametrize("K", [3, 6])
def test_the_exact_power_is_there_for_those_who_want_it(K: int) -> None:
    A = random_attention(24)
    filter = GFSA(1, K=K, learn=(), w0=0.0, w1=0.0, wK=1.0, power="exact").double()
    torch.testing.assert_close(
        DenseOperator(A[None]).filter(filter.coefficients())[0], torch.linalg.matrix_power(A, K)
    )
