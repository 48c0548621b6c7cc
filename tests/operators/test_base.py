"""Operators: the dense specification, calls, autocast and the choice of a backend."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from gfsa import graph_filter_attention
from gfsa.functional import which_backend
from gfsa.kernels import routes
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
from gfsa.operators.call import DecisionCache
from support.attention import (
    Case,
    cases,
    reference_attention,
    reference_filter,
    reference_map,
    relative_error,
    tokens,
)


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
    with pytest.raises(TypeError, match="FunctionOperator never builds its n×n matrix; build a"):
        ring.dense()


def test_degree_zero_takes_no_pass() -> None:
    v = torch.randn(5, 4)
    y = FunctionOperator(lambda x: pytest.fail("a pass")).polynomial(torch.tensor([3.0]), v)
    torch.testing.assert_close(y, 3 * v)


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


def test_the_dense_operator_of_a_call_is_the_specification() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.rand(2, 4, 5, 5) < 0.7
    call = AttentionCall(q, k, mask, 0.5, True, 0.3, True, "filter")
    expected = DenseOperator.from_qk(q, k, mask, True, 0.3).matrix
    assert torch.equal(DenseOperator.from_call(call).matrix, expected)
    call = call._replace(dropout_after="attention")
    assert torch.equal(DenseOperator.from_call(call.without_dropout()).matrix, expected)
    assert not torch.equal(DenseOperator.from_call(call).matrix, expected)
    # some heads have their rows of the map
    some = call.of_heads([0, 2, 3])
    assert some.dropout_p == 0.0
    torch.testing.assert_close(DenseOperator.from_call(some).matrix, expected[:, [0, 2, 3]])


def test_a_cache_of_decisions_empties_when_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecisionCache, "CAPACITY", 2)
    cache: DecisionCache[str] = DecisionCache()
    for number in range(3):
        cache.remember((number,), str(number))
        assert cache[(number,)] == str(number)
    assert list(cache) == [(2,)]


Q = torch.randn(1, 2, 5, 4)
COEFFS = torch.tensor([0.0, 1.0, 0.0])


def test_auto_takes_torchs_kernels_on_a_cpu_and_says_so() -> None:
    for backend in ("dense", "sdpa"):
        choice = which_backend(Q, Q, Q, COEFFS, backend=backend)
        assert (choice.backend, choice.reason) == (backend, "asked for by name")
    choice = which_backend(Q, Q, Q, COEFFS)
    assert choice.backend == "sdpa"
    assert "one pass a power" in choice.reason
    assert AttentionOperator(Q, Q).which(COEFFS, Q) == choice


def test_auto_falls_back_to_the_specification_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "_generator_cannot_be_reset", lambda device: True)
    choice = which_backend(Q, Q, Q, COEFFS, dropout_p=0.1)
    assert choice.backend == "dense"
    assert "the dense operator can" in choice.reason
    # one pass has but one mask: nothing to set back
    assert which_backend(Q, Q, Q, COEFFS[:2], dropout_p=0.1).backend == "sdpa"


def test_auto_weighs_a_fused_kernel_against_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faster, it is taken; slower, it is left, unless torch's kernels cannot serve at all."""
    # the decision is kept by what it depends on, of which the test replaces a part
    monkeypatch.setattr(routes, "_decided", routes._decide)
    monkeypatch.setattr(routes, "refusal_by_fused", lambda situation: None)
    monkeypatch.setattr(routes, "_reason_by_measurements", lambda situation: None)
    choice = which_backend(Q, Q, Q, COEFFS)
    assert (choice.backend, "fastest" in choice.reason) == ("fused", True)

    monkeypatch.setattr(routes, "_reason_by_measurements", lambda situation: "too short to gain")
    choice = which_backend(Q, Q, Q, COEFFS)
    assert (choice.backend, "too short to gain" in choice.reason) == ("sdpa", True)

    monkeypatch.setattr(routes, "_generator_cannot_be_reset", lambda device: True)
    choice = which_backend(Q, Q, Q, COEFFS, dropout_p=0.1)
    assert (choice.backend, "one dropout mask" in choice.reason) == ("fused", True)
    # where H is dropped, only the operator that builds it will do
    operator = AttentionOperator(Q, Q, dropout_p=0.1, dropout_after="filter")
    assert operator.which(COEFFS, Q).backend == "dense"


def test_a_captured_graph_cannot_set_the_generator_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert routes._generator_cannot_be_reset(torch.device("cuda"))
    assert not routes._generator_cannot_be_reset(torch.device("cpu"))


def test_a_name_that_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_generator_cannot_be_reset", lambda device: True)
    with pytest.raises(ValueError, match=r"backend='sdpa' cannot serve this call: one dropout"):
        graph_filter_attention(Q, Q, Q, COEFFS, dropout_p=0.1, backend="sdpa")
    with pytest.raises(ValueError, match=r"backend='fused' cannot serve this call"):
        graph_filter_attention(Q, Q, Q, COEFFS, backend="fused")
    with pytest.raises(ValueError, match=r"one of \('auto', 'dense', 'sdpa'.*got 'flash'"):
        graph_filter_attention(Q, Q, Q, COEFFS, backend="flash")  # type: ignore[arg-type]


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


def test_the_maps_can_be_looked_at() -> None:
    q, k, v = tokens(2, 3, 5, 4), tokens(2, 3, 5, 4), tokens(2, 3, 5, 6)
    coeffs = torch.randn(3, 4)
    attention = reference_map(q, k, is_causal=True)
    operator = DenseOperator.from_qk(q, k, is_causal=True)
    np.testing.assert_allclose(operator.dense(), attention, rtol=1e-12)
    expected = reference_filter(attention, coeffs)
    np.testing.assert_allclose(operator.filter(coeffs), expected, atol=1e-12)
    y = operator.polynomial(coeffs, v)
    assert relative_error(y, torch.from_numpy(expected) @ v) <= 1e-12


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


def test_torch_fx_gets_our_words() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return DenseOperator(x.softmax(-1)).apply(x)

    with pytest.raises(TypeError, match="cannot trace a filter"):
        torch.fx.symbolic_trace(Layer())
