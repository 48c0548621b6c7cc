r"""Theorem 3.1 of the paper: a filter's coefficients decide whether it is low- or high-pass.

The filter's response to a component of the graph that A multiplies by σ is
g(σ) = w0 + w1·σ + wK·p(σ), with p(σ) = σ^K for the exact power and
p(σ) = σ + (K−1)(σ² − σ) for the extrapolated one. The component of σ1 = 1 is the constant one
(the rows of A sum to one), so the filter is called low-pass if |g(σ)| < |g(1)| for the others,
0 ≤ σ < 1, and high-pass if |g(σ)| > |g(1)|.

Two things in the paper are looser than what is tested here:

- *low-pass*: its proof bounds g from above only. With the extrapolated power g can fall below −1:
  the bracket has its minimum −(K−2)²/(4(K−1)), which passes −1 at K = 7. So the theorem holds for
  any weights up to K = 6, and for every K with the exact power.
- *high-pass*: the statement has w_k = (−α)^k, the proof (−α)^k/(k+1). Both are high-pass for
  large K.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gfsa import GFSA, Laplacian, Polynomial, Twicing
from gfsa.operators import DenseOperator

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


@given(convex_weights(), st.integers(7, 30))
def test_low_pass_for_every_order_with_the_exact_power(weights, K: int) -> None:
    assert (gain(GFSA(1, K=K, power="exact", learn=(), **weights)) < 1).all()


@given(convex_weights(), st.integers(2, 30))
def test_what_the_papers_proof_shows(weights, K: int) -> None:
    """Its upper bound, for every K: g(σ) < w0 + (w1 + wK)·σ < 1."""
    g = response(GFSA(1, K=K, learn=(), **weights), SIGMA)
    assert (g <= weights["w0"] + (weights["w1"] + weights["wK"]) * SIGMA + 1e-12).all()
    assert (g < 1).all()


@pytest.mark.parametrize(("K", "low_pass"), [(6, True), (7, False), (10, False)])
def test_extrapolated_power_can_break_the_low_pass_case(K: int, low_pass: bool) -> None:
    """Nearly all weight on the high-order term: its minimum is −(K−2)²/(4(K−1))."""
    filter = GFSA(1, K=K, learn=(), w0=0.001, w1=0.001, wK=0.998)
    lowest = -((K - 2) ** 2) / (4 * (K - 1))
    assert response(filter, SIGMA).min().item() == pytest.approx(lowest, abs=0.01)
    assert (lowest > -1) == low_pass
    assert bool((gain(filter) < 1).all()) == low_pass


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


def test_alternating_weights_are_not_high_pass_for_small_orders() -> None:
    """ "Sufficiently large K" is needed: at K = 2 and α = 0.9 the filter rises again towards 1."""
    filter = GFSA(1, K=2, learn=(), w0=1.0, w1=-0.9, wK=0.81)
    assert (gain(filter) < 1).any()


def test_attention_itself_is_low_pass() -> None:
    assert (gain(GFSA(1)) < 1).all()
    assert torch.equal(gain(GFSA(1)), SIGMA)


def test_the_laplacian_removes_what_attention_keeps() -> None:
    assert response(Laplacian(1), torch.ones(()).double()) == 0
    torch.testing.assert_close(response(Laplacian(1), SIGMA), 1 - SIGMA)


def test_twicing_keeps_more_than_attention() -> None:
    assert (response(Twicing(1), SIGMA[1:]) > SIGMA[1:]).all()
    assert (gain(Twicing(1)) < 1).all()


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
