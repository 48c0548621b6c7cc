"""Filters of degree 1 in one pass, their kernels in the interpreter.

Not collected by itself: ``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import gfsa
from gfsa.kernels import (
    degree_one_attention,
    degree_one_launch,
    eligibility,
    tile_access,
)
from gfsa.kernels.degree_one_attention import filter_once
from gfsa.kernels.degree_one_launch import Tiles
from gfsa.kernels.eligibility import one_pass_is_fastest, refusal_by_one_pass
from gfsa.kernels.layout import copyable_by_tile
from gfsa.kernels.operator import FusedOperator
from gfsa.kernels.problem import Options
from gfsa.operators import AttentionCall, DenseOperator
from support.far_strides import spread
from support.fused_cases import NAMES, Problem, error

assert support.triton_interpreter

PROBLEMS = [
    Problem(1, 2, 70, 16),
    Problem(1, 2, 70, 24, is_causal=True, projected=True),
    Problem(1, 1, 130, 64, is_causal=True),
    Problem(3, 1, 64, 40, mask="keys"),
    Problem(3, 1, 20, 16, mask="keys", is_causal=True, projected=True),
    Problem(1, 4, 20, 16, key_heads=2, is_causal=True, scale=0.7),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def run(problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
    """What the kernels give, and what the specification gives in float64, as NAMES."""
    q, k, v, coeffs, g = problem.tensors()
    mask = problem.bool_mask()
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    coeffs = coeffs[:, :2]
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]
    options = Options(scale, problem.is_causal)
    assert refusal_by_one_pass(q, mask, scale, 0.0) is None
    out = filter_once(*inputs, mask, options)
    got = [out, *torch.autograd.grad(out, inputs, g)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    operator = DenseOperator.from_qk(*exact[:2], mask, problem.is_causal, scale)
    out = operator.polynomial(exact[3], exact[2])
    return got, [out, *torch.autograd.grad(out, exact, g.double())]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_agrees_with_the_specification(problem: Problem) -> None:
    for name, x, y in zip(NAMES, *run(problem), strict=True):
        assert x.shape == y.shape, name
        assert (x.double() - y).norm() <= 2e-6 * max(y.norm(), 1e-3), name


def test_keys_of_a_mask_may_lie_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further than 32 bits can count."""
    problem = Problem(2, 1, 40, 16, mask="keys")
    mask = problem.bool_mask()
    assert mask is not None
    far = spread(mask, -1)
    monkeypatch.setattr(Problem, "bool_mask", lambda self: far)
    for name, x, y in zip(NAMES, *run(problem), strict=True):
        assert (x.double() - y).norm() <= 2e-6 * max(y.norm(), 1e-3), name


def test_one_token() -> None:
    """The gradients of q and k are zero, up to the rounding of the largest result."""
    got, expected = run(Problem(1, 1, 1, 8))
    size = max(x.norm().item() for x in expected)
    for name, x, y in zip(NAMES, got, expected, strict=True):
        assert (x.double() - y).norm() <= 2e-6 * size, name


@pytest.fixture
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rows, cols = request.param
    monkeypatch.setattr(degree_one_launch, "tiles", lambda *_: Tiles(rows, cols, 4, 2))
    degree_one_launch._launch.cache_clear()
    yield
    degree_one_launch._launch.cache_clear()


@pytest.mark.parametrize("tiles", [(16, 32), (32, 16)], indirect=True, ids=str)
@pytest.mark.parametrize(
    "problem",
    [Problem(1, 1, 50, 24, is_causal=True), Problem(2, 1, 20, 16, mask="keys")],
    ids=str,
)
@pytest.mark.usefixtures("tiles")
def test_tiles_of_any_size(problem: Problem) -> None:
    for name, x, y in zip(NAMES, *run(problem), strict=True):
        assert (x.double() - y).norm() <= 2e-6 * y.norm(), name


@pytest.mark.parametrize("problem", PROBLEMS[1:6:4], ids=str)
def test_on_a_gpu_without_a_copy_engine(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """By addresses instead of descriptors the kernels give the same bits."""
    expected, _ = run(problem)
    monkeypatch.setattr(tile_access, "has_copy_engine", lambda x: False)
    torch.manual_seed(0)
    for name, x, y in zip(NAMES, run(problem)[0], expected, strict=True):
        assert torch.equal(x, y), name


def test_every_block_of_every_head_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order the programs take them: two heads together, then the one that is left."""
    problem = Problem(1, 3, 70, 16, is_causal=True)
    monkeypatch.setattr(degree_one_launch, "_heads_together", lambda problem: 2)
    degree_one_launch._launch.cache_clear()
    for name, x, y in zip(NAMES, *run(problem), strict=True):
        assert (x.double() - y).norm() <= 2e-6 * y.norm(), name
    degree_one_launch._launch.cache_clear()


def test_heads_together_fill_the_cache() -> None:
    problem = degree_one_launch.problem_of
    q = torch.empty(8, 12, 1024, 64, dtype=torch.bfloat16, device="meta")
    together = degree_one_launch._heads_together
    assert together(problem(q, q, None, Options(0.1))) == 1
    assert together(problem(q, q, None, Options(0.1, is_causal=True))) == 96
    q = torch.empty(64, 12, 1024, 64, dtype=torch.bfloat16, device="meta")
    assert together(problem(q, q, None, Options(0.1, is_causal=True))) == 96


def test_small_and_vanishing_weights() -> None:
    """Nothing is divided by c1: its gradient is right where it is zero, as is that of c0."""
    q, k, v, _, g = Problem(2, 2, 40, 16, is_causal=True).tensors()
    coeffs = torch.tensor([[1.0, 0.0], [0.0, 1e-6]])
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]
    out = filter_once(*inputs, None, Options(0.25, is_causal=True))
    got = [out, *torch.autograd.grad(out, inputs, g)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = DenseOperator.from_qk(*exact[:2], None, True, 0.25).polynomial(exact[3], exact[2])
    expected = [out, *torch.autograd.grad(out, exact, g.double())]
    size = max(x.norm().item() for x in expected)
    for name, x, y in zip(NAMES, got, expected, strict=True):
        # dq and dk are as small as c1, a difference of numbers that are as large as g and out
        assert (x.double() - y).norm() <= 2e-6 * (size if name in ("dq", "dk") else y.norm()), name


@pytest.fixture
def small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass serves calls that are too small to be measured."""
    monkeypatch.setattr(eligibility, "ONE_PASS_SHORTEST", 1)
    monkeypatch.setattr(eligibility, "ONE_PASS_NARROWEST", 1)


@pytest.mark.usefixtures("small_calls")
def test_a_filter_learns_by_the_kernels() -> None:
    """The coefficients and θ's gradient by kernels are those that torch works out."""
    heads = 3
    q, k, v, _, g = Problem(2, heads, 20, 16, is_causal=True, projected=True).tensors()
    layer = gfsa.GFSA(heads, K=None, w0=0.2, w1=0.7)
    assert layer.degree == 1
    inputs = [x.requires_grad_() for x in (q, k, v)] + [layer.theta]
    results = []
    for operator in (
        FusedOperator(AttentionCall(q, k, is_causal=True)),
        DenseOperator.from_qk(q, k, is_causal=True),
    ):
        y = layer(operator, v)
        results.append([y.detach(), *torch.autograd.grad(y, inputs, g)])
        with torch.no_grad():
            assert error(layer(operator, v), y) == 0
    for name, mine, exact in zip(NAMES, *results, strict=True):
        assert mine.shape == exact.shape
        assert error(mine, exact) <= 2e-6, name


@pytest.mark.parametrize("layout", ["expanded", "packed"])
def test_any_layout(layout: str) -> None:
    given = {
        "expanded": lambda: torch.randn(1, 1, 20, 16).expand(1, 2, 20, 16),
        "packed": lambda: torch.randn(1, 20, 3, 2, 16).permute(2, 0, 3, 1, 4)[2],
    }[layout]
    tokens, g, coeffs = [given() for _ in range(3)], given(), torch.randn(2, 2)
    results = []
    for mine in (tokens, [x.clone() for x in tokens]):
        inputs = [x.detach().requires_grad_() for x in (*mine, coeffs)]
        out = filter_once(*inputs, None, Options(0.25))
        results.append([out, *torch.autograd.grad(out, inputs, g)])
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)


def test_contiguous_and_off_the_border() -> None:
    """A view into a buffer may be contiguous and begin anywhere."""
    x = torch.randn(1 + 2 * 3 * 5 * 16)[1:].view(2, 3, 5, 16)
    assert x.is_contiguous()
    assert x.data_ptr() % 16
    y = copyable_by_tile(x)
    assert y.data_ptr() % 16 == 0
    assert torch.equal(x, y)


@pytest.mark.parametrize("row", [32, 33], ids=["as they are", "copied"])
def test_results_lie_as_the_compiler_expects(row: int) -> None:
    """Also if the copy engine does not take the rows of a projection as they are."""
    rows = torch.randn(3, 1, 20, row)[..., :32]
    q, k, v = rows.unflatten(3, (2, 16)).transpose(2, 3).unbind(0)
    coeffs = torch.randn(2, 2)

    def work() -> tuple[Tensor, ...]:
        out, u, lse = degree_one_attention.forward(q, k, v, coeffs, None, True, 0.25, False)
        saved = (q, k, v, out, u, lse, coeffs, None, True, 0.25)
        return out, lse, *degree_one_attention.backward(out, *saved)

    found = [x.stride() for x in work()]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert [x.stride() for x in work()] == found


def test_operator_registration() -> None:
    q, k, v = torch.randn(3, 1, 20, 2, 16).transpose(2, 3).unbind(0)
    inputs = [x.requires_grad_() for x in (q, k, v, torch.randn(2, 2))]
    mask = torch.ones(1, 1, 1, 20, dtype=torch.bool)
    # all that is quick here; the compiler's part is in interpreted_degree_one.py, and on the GPU
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (*inputs, mask, True, 0.25, False)
    torch.library.opcheck(degree_one_attention.forward, arguments, test_utils=checks)


def test_checkpointing() -> None:
    q, k, v, coeffs, g = Problem(1, 2, 40, 16).tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs[:, :2])]

    def work(*inputs: Tensor) -> Tensor:
        return filter_once(*inputs, None, Options(0.25))

    results = []
    for y in (work(*inputs), checkpoint(work, *inputs, use_reentrant=False)):
        results.append([y, *torch.autograd.grad(y, inputs, g)])
    for name, x, y in zip(NAMES, *results, strict=True):
        assert torch.equal(x, y), name


def test_no_second_derivative_in_silence() -> None:
    inputs = [x.requires_grad_() for x in (*torch.randn(3, 1, 1, 16, 16), torch.rand(1, 2))]
    out = filter_once(*inputs, None, Options(0.25))
    (dq,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(dq.sum(), inputs[:1])


@pytest.mark.parametrize(
    ("options", "mask", "head_dim", "reason"),
    [
        (Options(0.1, dropout_p=0.1), None, 64, "no dropout"),
        (Options(-0.1), None, 64, "positive scales"),
        (Options(0.1), torch.ones(1, 1, 300, 300, dtype=torch.bool), 64, "masks of keys"),
        (Options(0.1), torch.ones(1, 1, 1, 300), 64, "bool masks"),
        # which is for Hopper GPUs
        (Options(0.1), torch.zeros(1, 2, 300, dtype=torch.int32), 64, "spans in one sweep"),
        (Options(0.1), None, 80, "head dim of 64"),
    ],
)
def test_left_to_other_kernels(
    options: Options, mask: Tensor | None, head_dim: int, reason: str
) -> None:
    q = torch.empty(1, 1, 300, head_dim, device="meta")
    asked = (q, mask, options.scale, options.dropout_p)
    assert reason in refusal_by_one_pass(*asked)
    assert not one_pass_is_fastest(*asked)


@pytest.mark.parametrize(
    ("length", "head_dim", "padded", "serves"),
    [
        (196, 64, False, False),
        (197, 64, False, True),
        (256, 64, True, False),
        (300, 64, True, False),
        (1024, 64, False, True),
        (1024, 56, False, False),
        (2000, 64, False, False),
    ],
)
def test_what_was_measured(length: int, head_dim: int, padded: bool, serves: bool) -> None:
    q = torch.empty(1, 1, length, head_dim, device="meta")
    mask = torch.ones(1, 1, 1, length, dtype=torch.bool) if padded else None
    assert one_pass_is_fastest(q, mask, None, 0.0) is serves
