"""Operators as such: powers, their sum, and an operator given as a function."""

import pytest
import torch

from gfsa.operators import (
    AttentionCall,
    AttentionOperator,
    Coefficients,
    DenseOperator,
    FunctionOperator,
    LinearOperator,
    SDPAOperator,
    combine,
)
from gfsa.operators.base import at_least_float32


def test_a_function_is_an_operator() -> None:
    """Here the graph is a ring and A moves every token on by one."""
    ring = FunctionOperator(lambda x: x.roll(1, dims=-2))
    v = torch.randn(2, 3, 5, 4)
    assert torch.equal(ring.apply(v), v.roll(1, -2))
    powers = ring.powers(v, 3)
    assert len(powers) == 4
    assert all(torch.equal(u, v.roll(k, -2)) for k, u in enumerate(powers))
    y = ring.polynomial(torch.tensor([1.0, 0.0, 2.0]), v)
    torch.testing.assert_close(y, v + 2 * v.roll(2, -2))


def test_a_function_has_no_matrix_to_show() -> None:
    with pytest.raises(TypeError, match="FunctionOperator never builds its n×n matrix; build a"):
        FunctionOperator(lambda x: x).dense()


def test_degree_zero_takes_no_pass() -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("no pass was needed")

    v = torch.randn(5, 4)
    torch.testing.assert_close(FunctionOperator(refuse).polynomial(torch.tensor([3.0]), v), 3 * v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=["shared", "per head"])
def test_the_sum_is_rounded_once(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Two terms of a third of a unit in the last place add up to one that counts."""
    third = torch.finfo(dtype).eps / 3
    coeffs = torch.tensor([1.0, third, third]).expand(shape)
    ones = torch.ones(1, 2, 4, 8, dtype=dtype)
    total = combine(coeffs, [ones, ones, ones])
    assert total.dtype == dtype
    assert (total == 1 + torch.finfo(dtype).eps).all()


def test_output_takes_the_tokens_dtype_and_coefficients_their_own() -> None:
    coeffs = torch.tensor([0.5, 1.0], dtype=torch.float64)
    tokens = torch.ones(2, 3)
    assert combine(coeffs, [tokens, tokens]).dtype == torch.float32
    assert combine(coeffs.float(), [tokens.double(), tokens.double()]).dtype == torch.float64


def test_precision_in_which_sums_are_kept() -> None:
    assert at_least_float32(torch.bfloat16) == torch.float32
    assert at_least_float32(torch.float16) == torch.float32
    assert at_least_float32(torch.float64) == torch.float64


@pytest.mark.parametrize("powers", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_sum_in_one_go_is_the_same_sum(dtype: torch.dtype, powers: int) -> None:
    coeffs = torch.randn(2, powers)
    tokens = [torch.randn(3, 2, 1, 4, dtype=dtype) for _ in range(powers)]
    kept = [power.clone() for power in tokens]
    total = combine(coeffs, tokens, in_one_go=True)
    assert total.dtype == dtype
    assert torch.equal(total, combine(coeffs, tokens))
    # nothing that was given is written to
    assert all(map(torch.equal, tokens, kept))


def test_a_constant_in_one_go() -> None:
    tokens = torch.randn(2, 3, dtype=torch.bfloat16)
    total = combine(torch.tensor([2.0]), [tokens], in_one_go=True)
    assert torch.equal(total, 2 * tokens)


@pytest.mark.parametrize("is_diagonal", [False, True])
@pytest.mark.parametrize(
    "name", ["function", "dense", "dense, H dropped", "sdpa", "linear", "attention"]
)
def test_a_filters_coefficients_in_place_of_a_tensor(name: str, is_diagonal: bool) -> None:
    """Every operator gives the same tokens and the same gradient of θ for both."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    theta, base = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    basis = torch.randn(3).diag() if is_diagonal else torch.randn(3, 3)
    made = Coefficients(theta, base, basis, is_diagonal)
    torch.testing.assert_close(made.value(), base + theta @ basis)
    operator = {
        "function": lambda: FunctionOperator(lambda x: x.roll(1, -2)),
        "dense": lambda: DenseOperator.from_qk(q, k),
        "dense, H dropped": lambda: DenseOperator.from_qk(
            q, k, dropout_p=0.3, dropout_after="filter"
        ),
        "sdpa": lambda: SDPAOperator(AttentionCall(q, k)),
        "linear": lambda: LinearOperator(q, k),
        "attention": lambda: AttentionOperator(q, k),
    }[name]()
    results = []
    for coeffs in (made, made.value()):
        torch.manual_seed(1)
        y = operator.polynomial(coeffs, v)
        results.append((y, *torch.autograd.grad(y.sum(), theta)))
    assert all(map(torch.equal, *results))
