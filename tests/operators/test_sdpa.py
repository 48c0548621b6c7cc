"""Torch's attention kernels, one pass a power, against the specification."""

import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention import SDPBackend, sdpa_kernel

from gfsa import graph_filter_attention
from gfsa.operators import AttentionCall, DenseOperator, SDPAOperator
from gfsa.operators.blocked import as_additive
from support.attention import Case, Dispatched, cases, relative_error, tokens

CPU_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


@settings(max_examples=500)
@given(cases(max_length=17))
def test_agrees_with_dense(case: Case) -> None:
    sdpa = graph_filter_attention(*case.arguments, **case.options, backend="sdpa")
    dense = graph_filter_attention(*case.arguments, **case.options, backend="dense")
    assert sdpa.shape == dense.shape
    assert sdpa.dtype == dense.dtype
    assert relative_error(sdpa, dense) <= 1e-12


@settings(max_examples=300)
@given(cases())
def test_gradients_agree_with_dense(case: Case) -> None:
    """To q, k, v, the coefficients and an additive mask."""
    case.requires_grad()
    cotangent, gradients = None, {}
    for backend in ("dense", "sdpa"):
        y = graph_filter_attention(*case.arguments, **case.options, backend=backend)
        cotangent = torch.randn_like(y) if cotangent is None else cotangent
        found = torch.autograd.grad(
            y, case.leaves, cotangent, allow_unused=True, materialize_grads=True
        )
        gradients[backend] = torch.cat([gradient.flatten() for gradient in found])
    # differences are measured against the size of the whole gradient: a gradient that is zero but
    # for rounding (of k, when n = 1) has no relative error of its own
    size = max([1.0, *gradients["dense"].abs().tolist()])
    assert ((gradients["sdpa"] - gradients["dense"]).abs() <= 1e-12 * size).all()


def test_two_dimensional_inputs() -> None:
    q, k, v = torch.randn(3, 6, 4, dtype=torch.float64).unbind(0)
    coeffs = torch.tensor([0.2, 0.7, 0.4])
    y = graph_filter_attention(q, k, v, coeffs, is_causal=True, backend="sdpa")
    expected = DenseOperator.from_qk(q, k, is_causal=True).polynomial(coeffs, v)
    assert y.shape == (6, 4)
    assert relative_error(y, expected) <= 1e-12


@pytest.mark.parametrize("scale", [-0.7, 0.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scales_that_turn_a_hidden_score(scale: float, dtype: torch.dtype) -> None:
    """Such a scale times -inf is +inf or NaN, which torch's causal kernel on a CPU computes."""
    inputs = [torch.randn(2, 3, 9, 4).to(dtype).requires_grad_() for _ in range(3)]
    coeffs = torch.tensor([0.2, 0.7, 0.4])
    exact = [x.detach().double().requires_grad_() for x in inputs]
    y, expected = (
        graph_filter_attention(*each, coeffs, is_causal=True, scale=scale, backend=backend)
        for each, backend in ((inputs, "sdpa"), (exact, "dense"))
    )
    bound = 16 * torch.finfo(dtype).eps
    assert relative_error(y.double(), expected) <= bound
    found = torch.autograd.grad(y.double().square().sum(), inputs)
    wanted = torch.autograd.grad(expected.square().sum(), exact)
    size = max(gradient.abs().max() for gradient in wanted)
    for gradient, right in zip(found, wanted, strict=True):
        assert (gradient.double() - right).abs().max() <= bound * size


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": torch.tensor([[1, 1, 0, 1]] * 4).bool()},
    "an empty row": {"attn_mask": torch.tensor([[0, 0, 0, 0], [1, 1, 0, 1]] * 2).bool()},
    "causal and mask": {"attn_mask": torch.tensor([[0, 1, 1, 1]] * 4).bool(), "is_causal": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("backend", ["dense", "sdpa"])
def test_gradcheck(backend: str, options: dict) -> None:
    """Once and twice; of torch's kernels only the math one can be differentiated twice."""
    q, k, v = (tokens(1, 2, 4, 3).requires_grad_() for _ in range(3))
    coeffs = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)

    def attend(*x: torch.Tensor) -> torch.Tensor:
        return graph_filter_attention(*x, **options, backend=backend)

    torch.autograd.gradcheck(attend, (q, k, v, coeffs))
    one_head = [x[:, :1, :, :2].detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        torch.autograd.gradgradcheck(attend, (*one_head, coeffs[:1, :3].detach().requires_grad_()))


@pytest.mark.parametrize("backend", ["dense", "sdpa"])
def test_gradcheck_of_additive_mask_and_head_groups(backend: str) -> None:
    q = tokens(1, 4, 3, 2).requires_grad_()
    k, v = tokens(1, 2, 3, 2).requires_grad_(), tokens(1, 2, 3, 3).requires_grad_()
    coeffs = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 3, 3, dtype=torch.float64, requires_grad=True)

    def attend(q, k, v, coeffs, bias):
        return graph_filter_attention(
            q, k, v, coeffs, bias, is_causal=True, enable_gqa=True, backend=backend
        )

    torch.autograd.gradcheck(attend, (q, k, v, coeffs, bias))


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_costs_one_pass_a_power(degree: int) -> None:
    q = torch.randn(1, 2, 16, 8)
    with Dispatched() as dispatched:
        graph_filter_attention(q, q, q, torch.zeros(2, degree + 1), backend="sdpa")
    assert dispatched.count(CPU_KERNEL) == degree


@pytest.mark.parametrize("is_causal", [False, True])
def test_makes_no_square_tensor(is_causal: bool) -> None:
    n = 256
    q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for _ in range(3))
    coeffs = torch.tensor([0.1, 1.0, 0.3], requires_grad=True)
    with Dispatched() as dispatched:
        y = graph_filter_attention(q, k, v, coeffs, is_causal=is_causal, backend="sdpa")
        y.sum().backward()
    assert dispatched.count("backward") == 2
    assert dispatched.largest < n * n


def test_powers_have_every_query_head() -> None:
    q, k, v = tokens(2, 4, 5, 3), tokens(2, 2, 5, 3), tokens(2, 2, 5, 6)
    for degree in (0, 2):
        powers = SDPAOperator(AttentionCall(q, k, enable_gqa=True)).powers(v, degree)
        assert [tuple(power.shape) for power in powers] == [(2, 4, 5, 6)] * (degree + 1)
        assert torch.equal(powers[0], v.repeat_interleave(2, dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bool_mask_as_numbers_to_add(dtype: torch.dtype) -> None:
    q, k, v = (tokens(2, 3, 5, 4, dtype=dtype) for _ in range(3))
    mask = torch.rand(3, 5, 5) < 0.6
    additive = as_additive(mask, dtype)
    assert additive.dtype == dtype
    assert (additive[mask] == 0).all()
    assert (additive[~mask] == -torch.inf).all()
    y = SDPAOperator(AttentionCall(q, k, additive)).apply(v)
    torch.testing.assert_close(y, SDPAOperator(AttentionCall(q, k, mask)).apply(v))


def test_causality_may_be_a_comparison_of_sizes() -> None:
    """Under the compiler it is then a symbol, which torch's attention refuses."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return graph_filter_attention(q, k, v, c, is_causal=q.shape[2] > 1)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="eager")
    coeffs = torch.tensor([0.3, 1.0])
    for n in (6, 9, 1):
        given = *(tokens(1, 2, n, 8) for _ in range(3)), coeffs
        torch.testing.assert_close(compiled(*given), attend(*given))
