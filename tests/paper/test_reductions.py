"""What the paper says GFSA becomes for certain coefficients, and how many numbers it learns.

The graph networks are written here from their own formulas, on the graph that attention makes.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa import GFSA, Polynomial, graph_filter_attention
from gfsa.operators import DenseOperator
from support.attention import relative_error, tokens

HEADS = 2


@pytest.fixture
def graph() -> tuple[Tensor, Tensor]:
    """An attention map A, (heads, n, n), and features X on its nodes."""
    A = torch.randn(HEADS, 7, 7, dtype=torch.float64).softmax(-1)
    return A, torch.randn(HEADS, 7, 4, dtype=torch.float64)


def filtered(filter, graph: tuple[Tensor, Tensor]) -> Tensor:
    A, X = graph
    return filter.double()(DenseOperator(A), X)


def test_ordinary_attention() -> None:
    """w0 = wK = 0 and w1 = 1: softmax(QKᵀ/√d)·V, to the bit."""
    q, k, v = (tokens(2, HEADS, 9, 4, dtype=torch.float32) for _ in range(3))
    for filter in (GFSA(HEADS), GFSA(HEADS, K=None), GFSA(HEADS, power="exact"), Polynomial(HEADS)):
        y = graph_filter_attention(q, k, v, filter.coefficients())
        assert torch.equal(y, F.scaled_dot_product_attention(q, k, v))


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
    filter = GFSA(HEADS, K=None, w0=theta0, w1=-theta1)
    assert filter.degree == 1
    assert relative_error(filtered(filter, graph), expected) <= 1e-6
    fixed = GFSA(HEADS, K=None, learn=(), w0=theta0, w1=-theta1)
    assert relative_error(filtered(fixed, graph), expected) <= 1e-12


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


def test_order_only_rescales_how_the_high_order_weight_moves() -> None:
    """Every quadratic is a GFSA of every K: K chooses the coordinates, not the family."""
    wanted = torch.tensor([0.2, 0.7, -0.9], dtype=torch.float64)
    for K in (2, 3, 4, 10):
        wK = (wanted[2] / (K - 1)).item()
        filter = GFSA(HEADS, K=K, learn=(), w0=0.2, w1=0.7 - (2 - K) * wK, wK=wK).double()
        torch.testing.assert_close(filter.coefficients(), wanted.expand(HEADS, 3))


def learned_numbers(layers: int, heads: int, **options) -> int:
    model = nn.ModuleList(GFSA(heads, **options) for _ in range(layers))
    return sum(parameter.numel() for parameter in model.parameters())


def test_numbers_learned_as_the_paper_counts() -> None:
    """144 for BERT-base (12 layers of 12 heads), 72 for DeiT-S (12 of 6): one w_K a head."""
    assert learned_numbers(12, 12, learn=("wK",)) == 144
    assert learned_numbers(12, 6, learn=("wK",)) == 72


def test_numbers_learned_otherwise() -> None:
    assert learned_numbers(12, 12) == 3 * 144
    assert learned_numbers(12, 12, K=None) == 2 * 144
    assert learned_numbers(12, 12, learn=()) == 0
