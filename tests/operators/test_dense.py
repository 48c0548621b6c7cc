"""The specification, against loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from gfsa import graph_filter_attention
from gfsa.operators import DenseOperator
from support.attention import (
    Case,
    cases,
    reference_attention,
    reference_filter,
    reference_map,
    relative_error,
    tokens,
)


def stochastic(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).softmax(-1)


@settings(max_examples=200)
@given(cases())
def test_is_the_formula(case: Case) -> None:
    y = graph_filter_attention(*case.arguments, **case.options, backend="dense")
    expected = reference_attention(*case.arguments, **case.options)
    assert y.shape == expected.shape
    assert y.dtype == torch.float64
    assert relative_error(y, expected) <= 1e-12


def test_attention_map_and_filtered_map_can_be_looked_at() -> None:
    q, k, coeffs = tokens(2, 3, 5, 4), tokens(2, 3, 5, 4), torch.randn(3, 4)
    operator = DenseOperator.from_qk(q, k, is_causal=True)
    attention = reference_map(q, k, is_causal=True)
    np.testing.assert_allclose(operator.dense(), attention, rtol=1e-12)
    np.testing.assert_allclose(
        operator.filter(coeffs), reference_filter(attention, coeffs), atol=1e-12
    )


def test_filter_of_degree_zero_is_a_multiple_of_the_identity() -> None:
    response = DenseOperator(stochastic(2, 3, 5, 5)).filter(torch.tensor([2.5]))
    torch.testing.assert_close(response, 2.5 * torch.eye(5).double().expand(2, 3, 5, 5))


def test_multiplier_is_applied_after_the_softmax() -> None:
    q, k, v = tokens(2, 3, 5, 4), tokens(2, 3, 5, 4), tokens(2, 3, 5, 6)
    multiplier = torch.rand(2, 1, 5, 5, dtype=torch.float64)
    coeffs = torch.tensor([0.5, 1.0, -0.3])
    attention = reference_map(q, k) * multiplier.numpy()
    expected = torch.from_numpy(reference_filter(attention, coeffs)) @ v
    operator = DenseOperator.from_qk(q, k, multiplier=multiplier)
    assert relative_error(operator.polynomial(coeffs, v), expected) <= 1e-12


@pytest.mark.parametrize("shape", [(5, 5), (1, 5, 5), (3, 5, 5), (2, 1, 5, 5), (2, 3, 5, 5)])
def test_takes_any_square_matrix(shape: tuple[int, ...]) -> None:
    """Also one that no softmax gave (talking heads) and one shared by all heads or samples."""
    matrix, v = torch.randn(shape, dtype=torch.float64), tokens(2, 3, 5, 4)
    coeffs = torch.randn(3, 3, dtype=torch.float64)
    expected = torch.from_numpy(
        reference_filter(matrix.expand(2, 3, 5, 5).numpy(), coeffs) @ v.numpy()
    )
    operator = DenseOperator(matrix)
    assert operator.dense() is matrix
    assert relative_error(operator.polynomial(coeffs, v), expected) <= 1e-12
    assert relative_error(operator.apply(v), matrix @ v) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 3, 32, 8).to(dtype) for _ in range(3))
    coeffs = torch.tensor([0.3, 1.0, -0.4, 0.2])
    y = DenseOperator.from_qk(q, k).polynomial(coeffs, v)
    assert y.dtype == dtype
    # what float32 gives, rounded: nothing else was lost
    exact = DenseOperator.from_qk(q.float(), k.float()).polynomial(coeffs, v.float())
    assert torch.equal(y, exact.to(dtype))


def test_gradients_reach_the_matrix() -> None:
    matrix, v = stochastic(2, 4, 4).requires_grad_(), tokens(2, 4, 3).requires_grad_()
    coeffs = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda a, c, x: DenseOperator(a).polynomial(c, x), (matrix, coeffs, v))


def test_refuses_a_matrix_that_is_not_square() -> None:
    with pytest.raises(ValueError, match=r"square.*\(\.\.\., N, N\), got \(2, 4, 5\).*self-att"):
        DenseOperator(torch.zeros(2, 4, 5))
    with pytest.raises(ValueError, match=r"got \(4,\)"):
        DenseOperator(torch.zeros(4))


def test_refuses_an_unknown_place_for_dropout() -> None:
    with pytest.raises(ValueError, match="'attention' or 'filter', got 'values'"):
        DenseOperator(torch.zeros(4, 4), 0.1, dropout_after="values")  # type: ignore[arg-type]


def test_torch_fx_gets_our_words() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return DenseOperator(x.softmax(-1)).apply(x)

    with pytest.raises(TypeError, match="cannot trace a filter"):
        torch.fx.symbolic_trace(Layer())
