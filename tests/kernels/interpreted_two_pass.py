"""The kernels of any length and those of the coefficients on the CPU, in Triton's interpreter.

Not collected by itself: the interpreter has to be switched on before triton is imported, so
``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

import pytest
import torch

import gfsa
from gfsa.filters import GFSA, PartialPolynomial
from gfsa.kernels import coefficients, two_pass
from gfsa.kernels.launching import Options
from gfsa.kernels.op import FusedOperator, filter_attention
from gfsa.operators import AttentionCall, Coefficients, DenseOperator, SDPAOperator, Visibility
from support import packed_cases
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
from support.packed_cases import Packed

assert support.triton_interpreter

# of unequal sizes, so that a border is inside of a tile of one kernel and beside one of another
TALL, WIDE = two_pass.Tiles(32, 16, 4, 2), two_pass.Tiles(16, 32, 4, 2)
SMALL = {"attend": TALL, "combine": WIDE, "grad_first_pass": TALL}
SMALL |= {"grad_keys": WIDE, "grad_queries": TALL}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a short sequence takes several."""
    for name, tiles in SMALL.items():
        monkeypatch.setitem(two_pass.TILES, name, {256: tiles})
    for table in ("CAUSAL_TILES", "PACKED_TILES", "TALL_FROM"):
        monkeypatch.setattr(two_pass, table, {})


@pytest.mark.parametrize(
    "problem",
    [
        Problem(1, 2, 33, 16),
        Problem(2, 1, 48, 32, projected=True),
        Problem(1, 2, 50, 16, is_causal=True),
        Problem(2, 1, 40, 24, mask="keys"),
        Problem(1, 2, 35, 16, mask="full"),
        Problem(1, 2, 20, 16, mask="per head", is_causal=True),
        Problem(1, 4, 34, 16, 2),
        Problem(2, 2, 33, 16, 1, is_causal=True, mask="keys", projected=True),
        Problem(1, 2, 33, 16, dropout_p=0.4),
        Problem(2, 2, 40, 16, 1, dropout_p=0.2, is_causal=True, mask="keys"),
        Problem(1, 1, 17, 8, scale=-0.7),
        Problem(1, 1, 16, 72),
        Problem(1, 2, 33, 200, 1, is_causal=True, mask="keys"),
        Problem(1, 2, 1, 16),
        # documents and windows
        Packed([[32, 48, 16]]),
        Packed([[1, 1, 33, 1, 2, 25, 1]]),
        Packed([[5, 43], [32, 16], [48]], heads=1, projected=True, scale=-0.3),
        Packed([[45, 19]], heads=2, key_heads=1),
        Packed([[40]], heads=1, window=1),
        Packed([[40]], heads=1, window=1000),
        Packed([[90]], heads=1, window=37),
        Packed([[50, 3, 27], [20, 20, 40]], heads=2, key_heads=1, window=30),
        Packed([[40, 30]], heads=1, dropout_p=0.3, window=25),
        Packed([[1]]),
        # by the same kernels, with c2 = 0
        Packed([[32, 10]], heads=1, degree=1),
        Packed([[40, 30]], heads=1, dropout_p=0.3, window=25, degree=1),
    ],
    ids=str,
)
def test_agrees_with_the_specification(problem: Problem | Packed) -> None:
    assert_agree(*(run(problem) if isinstance(problem, Problem) else packed_cases.run(problem)))


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
    for x in outcome(lambda *given: filter_attention(*given, None, None, Options(0.25)), inputs, g):
        assert torch.isfinite(x).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_logsumexps_far_below_zero(is_causal: bool) -> None:
    """Where the probability of a key beyond the last one overflows."""
    q = torch.full((1, 1, 37, 16), -6.0)
    inputs = [x.requires_grad_() for x in (q, -q, torch.randn_like(q), torch.ones(1, 3))]
    options = Options(1.0, is_causal)
    g = torch.randn_like(q)
    for x in outcome(lambda *given: filter_attention(*given, None, None, options), inputs, g):
        assert torch.isfinite(x).all()


def test_results_lie_in_memory_as_the_tokens_do() -> None:
    *inputs, g = Problem(2, 2, 20, 16, projected=True).tensors()
    inputs = [x.requires_grad_() for x in inputs]
    for x in outcome(lambda *given: filter_attention(*given, None, None, Options(0.25)), inputs, g)[
        :4
    ]:
        assert x.transpose(1, 2).is_contiguous()


def test_no_tile_of_another_document_is_read() -> None:
    """NaN in hidden tiles would spread into the sums, were they multiplied by zero."""
    packed = Packed([[64, 32, 32]], heads=1)
    q, k, v, coeffs, g = packed.tensors()
    for x in (q, k, v, g):
        x[:, :, :64] = float("nan")
        x[:, :, 96:] = float("nan")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    y = FusedOperator(packed.call(q, k)).polynomial(coeffs, v)
    for x in (y, *torch.autograd.grad(y, inputs, g)):
        assert torch.isfinite(x[:, :, 64:96]).all()
        assert x[:, :, :64].isnan().all()


def test_scores_of_another_document_are_no_maximum() -> None:
    """In a block that two documents share, the first one's scores would make the others vanish."""
    packed = Packed([[70, 27]], heads=1)
    q, k, v, coeffs, _ = packed.tensors()
    k[:, :, :70] *= 300
    y = FusedOperator(packed.call(q, k)).polynomial(coeffs, v)
    exact = DenseOperator.from_call(packed.call(q.double(), k.double()))
    assert error(y[:, :, 70:], exact.polynomial(coeffs.double(), v.double())[:, :, 70:]) <= 2e-6


@pytest.mark.parametrize("degree", [1, 2])
def test_spans_are_computed_inside_of_a_compiled_graph(degree: int) -> None:
    packed = Packed([[10, 8]], heads=1, degree=degree)
    *inputs, g = packed.tensors()
    inputs = [x.requires_grad_() for x in inputs]
    documents = packed.visible().documents

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        visible = Visibility(causal=True, window=5, documents=documents, in_order=True)
        call = AttentionCall(inputs[0], inputs[1], visible=visible)
        return FusedOperator(call).polynomial(inputs[3], inputs[2])

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same_bits(outcome(step, inputs, g), outcome(compiled, inputs, g))


def test_single_passes_are_torchs() -> None:
    q, k, v, _, _ = Problem(1, 2, 18, 16, 1).tensors()
    call = AttentionCall(q, k, is_causal=True, enable_gqa=True)
    fused, sdpa = FusedOperator(call), SDPAOperator(call)
    assert torch.equal(fused.apply(v), sdpa.apply(v))
    assert_same_bits(fused.powers(v, 3), sdpa.powers(v, 3))


@pytest.mark.parametrize(("K", "heads"), [(2, 1), (5, 3)])
def test_a_filter_learns_by_the_kernels(K: int, heads: int) -> None:
    """The coefficients and θ's gradient by kernels are those that torch works out."""
    layer = gfsa.GFSA(heads, K=K, w0=0.2, w1=0.7, wK=0.4)
    assert_learns_by_the_kernels(layer, Problem(2, heads, 20, 16))


@pytest.mark.parametrize("learn", [("w0", "w1"), ("w1",)], ids="-".join)
def test_a_filter_of_degree_one_on_documents(learn: tuple[str, ...]) -> None:
    """The gradient of what it learns: of two numbers at most, although the kernels give three."""
    packed = Packed([[12, 9], [21]], key_heads=1, window=9, degree=1)
    q, k, v, _, g = packed.tensors()
    layer = GFSA(2, K=None, learn=learn, w0=0.4, w1=0.7)
    results = []
    for operator, dtype in (
        (FusedOperator, torch.float32),
        (DenseOperator.from_call, torch.float64),
    ):
        layer.to(dtype)
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        y = layer(operator(packed.call(*inputs[:2])), inputs[2])
        results.append([y, *torch.autograd.grad(y, [*inputs, layer.theta], g.to(dtype))])
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape
        assert error(got, expected) <= 2e-6


@pytest.mark.parametrize("high", [[0, 2], [1]])
def test_a_filter_whose_basis_differs_from_head_to_head(high: list[int]) -> None:
    """The kernels read one basis for all heads; torch computes these coefficients."""
    layer = PartialPolynomial(3, degree=2, high=high)
    with torch.no_grad():
        layer.theta.copy_(torch.randn(3, 3))
    assert_learns_by_the_kernels(layer, Problem(1, 3, 20, 16))


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
