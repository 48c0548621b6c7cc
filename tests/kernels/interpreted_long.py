"""The long kernels and those of the coefficients on the CPU, in Triton's interpreter.

Not collected by itself: the interpreter has to be switched on before triton is imported, so
``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gfsa
from gfsa.filters import PartialPolynomial
from gfsa.kernels import coefficients, launching, op, two_pass
from gfsa.kernels.launching import Options
from gfsa.kernels.op import FusedOperator, filter_attention
from gfsa.operators import AttentionCall, Coefficients, DenseOperator, SDPAOperator
from support.far_strides import PAST_INT32, spread
from support.fused_cases import (
    NAMES,
    MaskKind,
    Problem,
    assert_agree,
    assert_learns_by_the_kernels,
    assert_same_bits,
    error,
    outcome,
    run,
)

assert support.triton_interpreter

SMALL = {
    "attend": two_pass.Tiles(32, 16, 4, 2),
    "combine": two_pass.Tiles(16, 32, 4, 2),
    "grad_first_pass": two_pass.Tiles(32, 16, 4, 2),
    "grad_keys": two_pass.Tiles(32, 16, 4, 2),
    "grad_queries": two_pass.Tiles(16, 32, 4, 2),
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a short sequence takes several, also of unequal sizes."""
    torch.manual_seed(0)
    for name, tiles in SMALL.items():
        monkeypatch.setitem(two_pass.TILES, name, {128: tiles})
    monkeypatch.setattr(two_pass, "TALL_FROM", {})
    monkeypatch.setattr(two_pass, "CAUSAL_TILES", {})


@pytest.mark.parametrize(
    "problem",
    [
        Problem(1, 2, 33, 16),
        Problem(2, 1, 48, 32, projected=True),
        Problem(1, 2, 50, 16, is_causal=True),
        Problem(2, 1, 40, 24, mask="keys"),
        Problem(3, 1, 37, 16, mask="keys", is_causal=True),
        Problem(1, 2, 35, 16, mask="full"),
        Problem(1, 2, 20, 16, mask="per head", is_causal=True),
        Problem(1, 4, 34, 16, 2),
        Problem(2, 2, 33, 16, 1, is_causal=True, mask="keys", projected=True),
        Problem(1, 2, 33, 16, dropout_p=0.4),
        Problem(2, 2, 40, 16, 1, dropout_p=0.2, is_causal=True, mask="keys"),
        Problem(1, 1, 17, 8, scale=-0.7),
        Problem(1, 1, 16, 72),
        Problem(1, 2, 1, 16),
    ],
    ids=str,
)
def test_agrees_with_the_specification(problem: Problem) -> None:
    assert_agree(*run(problem))


@pytest.mark.parametrize("kind", ["keys", "full"])
def test_entries_of_a_mask_may_lie_far_apart(
    kind: MaskKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further than 32 bits can count, though each stride fits into them."""
    problem = Problem(2, 1, 40, 16, mask=kind)
    mask = problem.bool_mask()
    assert mask is not None
    far = spread(mask, -1)
    assert far.stride(-1) < PAST_INT32 <= far.stride(-1) * 39
    monkeypatch.setattr(Problem, "bool_mask", lambda self: far)
    for name, x, y in zip(NAMES, *run(problem), strict=True):
        assert error(x, y) <= 2e-6, name


def test_memory_beyond_the_tensors_is_never_used() -> None:
    surroundings = torch.full((4, 1, 2, 60, 16), float("nan"))
    inside = surroundings[..., 7 : 7 + 37, :]
    inside.copy_(torch.randn(inside.shape))
    q, k, v, g = inside.unbind(0)
    inputs = [x.detach().requires_grad_() for x in (q, k, v, torch.randn(2, 3))]
    out = filter_attention(*inputs, None, None, Options(0.25))
    for x in (out, *torch.autograd.grad(out, inputs, g)):
        assert torch.isfinite(x).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_logsumexps_far_below_zero(is_causal: bool) -> None:
    """Where the probability of a key beyond the last one overflows."""
    q = torch.full((1, 1, 37, 16), -6.0)
    inputs = [q, -q, torch.randn_like(q), torch.ones(1, 3)]
    inputs = [x.requires_grad_() for x in inputs]
    out = filter_attention(*inputs, None, None, Options(1.0, is_causal))
    for x in (out, *torch.autograd.grad(out, inputs, torch.randn_like(out))):
        assert torch.isfinite(x).all()


def test_results_lie_in_memory_as_the_tokens_do() -> None:
    problem = Problem(2, 2, 20, 16, projected=True)
    q, k, v, coeffs, g = problem.tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]
    out = filter_attention(*inputs, None, None, Options(0.25))
    assert out.transpose(1, 2).is_contiguous()
    for x in torch.autograd.grad(out, inputs[:3], g):
        assert x.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("layout", ["expanded", "features apart", "off the border"])
def test_any_layout(layout: str) -> None:
    """What the copy engine cannot take is copied first."""
    x = torch.randn(1, 2, 20, 16)
    given = {
        "expanded": torch.randn(1, 1, 20, 16).expand(1, 2, 20, 16),
        "features apart": torch.randn(1, 2, 16, 20).transpose(2, 3),
        "off the border": torch.randn(1, 2, 20, 17)[..., 1:],
    }[layout]
    coeffs = torch.randn(2, 3)
    got = filter_attention(given, x, given, coeffs, None, None, Options(0.25))
    copy = given.clone()
    expected = filter_attention(copy, x, copy.clone(), coeffs, None, None, Options(0.25))
    assert torch.equal(got, expected)


def test_operator_registration() -> None:
    problem = Problem(1, 2, 18, 16, 1, projected=True)
    inputs = [x.requires_grad_() for x in problem.tensors()[:4]]
    mask = torch.rand(1, 1, 1, 18) < 0.8
    seed = torch.tensor([3])
    given = (*inputs, None, mask, seed, 0.25, True, 0.1, False, True)
    torch.library.opcheck(op.forward, given)


def test_compiled_whole() -> None:
    q, k, v, coeffs, g = Problem(1, 2, 18, 16).tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        return filter_attention(*inputs, None, None, Options(0.25)) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same_bits(outcome(step, inputs, g), outcome(compiled, inputs, g))


def test_operator_and_checkpointing() -> None:
    """Recomputing the forward draws the same dropout mask again."""
    q, k, v, _, g = Problem(1, 2, 18, 16).tensors()
    coeffs = torch.tensor([0.2, 0.9, 0.3])
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return FusedOperator(AttentionCall(q, k, dropout_p=0.3, is_causal=True)).polynomial(c, v)

    results = []
    for work in (run, lambda *x: checkpoint(run, *x, use_reentrant=False)):
        torch.manual_seed(5)
        results.append(outcome(work, inputs, g))
    assert_same_bits(*results)
    assert results[0][-1].shape == (3,)


def test_single_passes_are_torchs() -> None:
    q, k, v, _, _ = Problem(1, 2, 18, 16, 1).tensors()
    call = AttentionCall(q, k, is_causal=True, enable_gqa=True)
    fused, sdpa = FusedOperator(call), SDPAOperator(call)
    assert torch.equal(fused.apply(v), sdpa.apply(v))
    for mine, theirs in zip(fused.powers(v, 3), sdpa.powers(v, 3), strict=True):
        assert torch.equal(mine, theirs)


def test_no_second_derivative_in_silence() -> None:
    inputs = [x.requires_grad_() for x in Problem(1, 1, 16, 16).tensors()[:4]]
    out = filter_attention(*inputs, None, None, Options(0.25))
    (dq,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(dq.sum(), inputs[:1])


@pytest.mark.parametrize("K", [2, 5])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_filter_learns_by_the_kernels(K: int, heads: int) -> None:
    """The coefficients and θ's gradient by kernels are those that torch works out."""
    layer = gfsa.GFSA(heads, K=K, w0=0.2, w1=0.7, wK=0.4)
    assert_learns_by_the_kernels(layer, Problem(3, heads, 40, 16))


@pytest.mark.parametrize("high", [[0, 2], [1]])
def test_a_filter_whose_basis_differs_from_head_to_head(high: list[int]) -> None:
    """The kernels read one basis for all heads; torch computes these coefficients."""
    q, k, v, _, g = Problem(1, 3, 20, 16).tensors()
    layer = PartialPolynomial(3, degree=2, high=high)
    with torch.no_grad():
        layer.theta.copy_(torch.randn(3, 3))
    results = []
    for operator in (FusedOperator(AttentionCall(q, k)), DenseOperator.from_qk(q, k)):
        y = layer(operator, v)
        results.append([y.detach(), *torch.autograd.grad(y, [layer.theta], g)])
        with torch.no_grad():
            assert error(layer(operator, v), y) <= 1e-6
    for fused, exact in zip(*results, strict=True):
        assert error(fused, exact) <= 2e-6


@pytest.mark.parametrize(("powers", "given"), [(3, 3), (2, 2), (2, 3)])
def test_few_and_many_parts_of_the_coefficients_gradient(
    powers: int, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of powers that a filter lacks are left out, whatever they hold."""
    basis = torch.randn(2, powers)
    for number in (1, 7, 4096, 9500):
        parts = torch.randn(5, given, number)
        assert error(coefficients.total(parts), parts.double().sum(2)) <= 1e-5
        expected = parts[:, :powers].double().sum(2) @ basis.double().T
        parts[:, powers:] = float("nan")
        assert error(coefficients.gradients(parts, basis, 3, True, False)[0], expected) <= 1e-5
        with monkeypatch.context() as patch:
            patch.setattr(coefficients, "MOST_PARTS", 0)
            assert error(coefficients.gradients(parts, basis, 3, True, False)[0], expected) <= 1e-5


@pytest.mark.parametrize("learned", [1, 3])
@pytest.mark.parametrize("powers", [2, 3])
def test_coefficients_of_powers_that_a_filter_lacks_are_zero(powers: int, learned: int) -> None:
    theta, base, basis = (torch.randn(s) for s in ((5, learned), (5, powers), (learned, powers)))
    coeffs = coefficients.evaluate(Coefficients(theta, base, basis))
    assert coeffs.shape == (5, 3)
    assert error(coeffs[:, :powers], base.double() + theta.double() @ basis.double()) <= 1e-6
    assert (coeffs[:, powers:] == 0).all()


@pytest.mark.parametrize(
    "problem",
    [
        Problem(1, 2, 70, 24, is_causal=True, projected=True),
        Problem(2, 2, 40, 16, mask="keys", key_heads=1),
    ],
    ids=str,
)
def test_on_a_gpu_without_a_copy_engine(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """By addresses instead of descriptors the kernels give the same bits."""
    torch.manual_seed(0)
    expected, _ = run(problem)
    monkeypatch.setattr(launching, "has_copy_engine", lambda x: False)
    torch.manual_seed(0)
    assert_same_bits(run(problem)[0], expected)
