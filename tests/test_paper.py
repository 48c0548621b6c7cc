"""The paper's theorems 3.1 and 4.1, and filters that reduce to known methods."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gfsa import GFSA, Polynomial
from gfsa.operators import DenseOperator
from support.attention import relative_error

SIGMA = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
POWERS = ("extrapolated", "exact")


def response(filter, sigma: torch.Tensor) -> torch.Tensor:
    """g(σ), from the coefficients that the filter gives to attention."""
    coefficients = filter.double().coefficients()[0]
    return sum(c * sigma**k for k, c in enumerate(coefficients))


def gain(filter) -> torch.Tensor:
    """|g(σ)/g(1)| over 0 ≤ σ < 1."""
    return (response(filter, SIGMA) / response(filter, torch.ones(()).double())).abs()


@st.composite
def convex_weights(draw) -> dict[str, float]:
    parts = [draw(st.floats(0.01, 1.0)) for _ in range(3)]
    return {name: part / sum(parts) for name, part in zip(("w0", "w1", "wK"), parts, strict=True)}


@given(convex_weights(), st.integers(2, 6), st.sampled_from(POWERS))
def test_positive_weights_that_sum_to_one_are_low_pass(weights, K: int, power: str) -> None:
    filter = GFSA(1, K=K, power=power, learn=(), **weights)
    assert response(filter, torch.ones(()).double()).item() == pytest.approx(1.0)
    assert (gain(filter) < 1).all()


@given(convex_weights(), st.integers(2, 30))
def test_what_the_papers_proof_shows(weights, K: int) -> None:
    """Its upper bound, for every K: g(σ) < w0 + (w1 + wK)·σ < 1."""
    g = response(GFSA(1, K=K, learn=(), **weights), SIGMA)
    assert (g <= weights["w0"] + (weights["w1"] + weights["wK"]) * SIGMA + 1e-12).all()
    assert (g < 1).all()


@given(st.floats(0.05, 0.9), st.sampled_from(POWERS), st.booleans())
def test_alternating_weights_are_high_pass_for_large_orders(
    alpha: float, power: str, as_in_the_proof: bool
) -> None:
    K = 200

    def weight(k: int) -> float:
        return (-alpha) ** k / (k + 1 if as_in_the_proof else 1)

    filter = GFSA(1, K=K, power=power, learn=(), w0=weight(0), w1=weight(1), wK=weight(K))
    assert (gain(filter) > 1).all()
    # and the limit that the proof names
    slope = alpha / 2 if as_in_the_proof else alpha
    torch.testing.assert_close(gain(filter), (1 - slope * SIGMA) / (1 - slope))


def test_the_response_is_what_attention_does() -> None:
    """On a symmetric map the eigenvectors of A are those of H, with g(σ) for σ."""
    scores = torch.randn(8, 8, dtype=torch.float64)
    A = (scores + scores.T).exp()
    # symmetric and doubly stochastic in the limit
    for _ in range(500):
        A = A / A.sum(-1, keepdim=True)
        A = (A + A.T) / 2
    values, vectors = torch.linalg.eigh(A)
    assert values[-1].item() == pytest.approx(1.0)
    filter = Polynomial(1, degree=3)
    filter.set_coefficients(torch.tensor([0.3, -0.5, 0.25, 1.5]))
    y = filter.double()(DenseOperator(A[None]), vectors[None])[0]
    torch.testing.assert_close(y, vectors * response(filter, values))


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


HEADS = 2


@pytest.fixture
def graph() -> tuple[Tensor, Tensor]:
    """An attention map A, (heads, n, n), and features X on its nodes."""
    A = torch.randn(HEADS, 7, 7, dtype=torch.float64).softmax(-1)
    return A, torch.randn(HEADS, 7, 4, dtype=torch.float64)


def filtered(filter, graph: tuple[Tensor, Tensor]) -> Tensor:
    A, X = graph
    return filter.double()(DenseOperator(A), X)


def test_gcn(graph) -> None:
    """Kipf and Welling's propagation Â·X is the filter without I and without a high order."""
    A, X = graph
    assert relative_error(filtered(GFSA(HEADS, K=None, learn=()), graph), A @ X) <= 1e-12


def test_chebnet_of_order_one(graph) -> None:
    """θ0·T0(L̃)·X + θ1·T1(L̃)·X with T0 = 1, T1(x) = x on the scaled Laplacian L̃ = −A."""
    A, X = graph
    theta0, theta1 = 0.7, -0.4
    # λ_max = 2 scales L = I − A to L̃ = 2·L/λ_max − I = −A
    identity = torch.eye(7, dtype=torch.float64)
    scaled = 2 * (identity - A) / 2 - identity
    expected = theta0 * X + theta1 * scaled @ X
    # θ of a filter that learns is float32
    for learn, room in (((), 1e-12), (("w0", "w1"), 1e-6)):
        filter = GFSA(HEADS, K=None, learn=learn, w0=theta0, w1=-theta1)
        assert filter.degree == 1
        assert relative_error(filtered(filter, graph), expected) <= room


@pytest.mark.parametrize("order", [2, 5])
def test_gpr_gnn(graph, order: int) -> None:
    """Σ γ_k Â^k X with free γ: a Polynomial; with γ0, γ1, γ_K alone, GFSA's exact power."""
    A, X = graph
    gamma = torch.linspace(1, -0.5, order + 1, dtype=torch.float64)
    hidden, expected = X, gamma[0] * X
    for k in range(1, order + 1):
        hidden = A @ hidden
        expected = expected + gamma[k] * hidden
    polynomial = Polynomial(HEADS, degree=order).double()
    polynomial.set_coefficients(gamma)
    assert relative_error(filtered(polynomial, graph), expected) <= 1e-12

    w0, w1, wK = 0.3, 0.6, -0.2
    sparse = w0 * X + w1 * A @ X + wK * torch.linalg.matrix_power(A, order) @ X
    filter = GFSA(HEADS, K=order, learn=(), w0=w0, w1=w1, wK=wK, power="exact")
    assert relative_error(filtered(filter, graph), sparse) <= 1e-12


@pytest.mark.parametrize("K", [2, 3, 6])
def test_gread(graph, K: int) -> None:
    """A·X + β·(A − A²)·X, reaction and diffusion: a negative w_K = −β/(K−1), with w1 = 1 − w_K.

    The paper says "similar"; with w1 free it is the same.
    """
    A, X = graph
    beta = 0.8
    expected = A @ X + beta * (A - A @ A) @ X
    wK = -beta / (K - 1)
    filter = GFSA(HEADS, K=K, learn=(), w1=1 - wK, wK=wK)
    assert relative_error(filtered(filter, graph), expected) <= 1e-12


@pytest.mark.parametrize(("heads", "count"), [(12, 144), (6, 72)])
def test_numbers_learned_as_the_paper_counts(heads: int, count: int) -> None:
    """144 for BERT-base (12 layers of 12 heads), 72 for DeiT-S (12 of 6): one w_K a head."""
    model = nn.ModuleList(GFSA(heads, learn=("wK",)) for _ in range(12))
    assert sum(parameter.numel() for parameter in model.parameters()) == count
