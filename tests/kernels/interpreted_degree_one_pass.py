"""Degree 1 in one pass: its forward kernel. The gradient is Gluon's.

Not collected by itself: ``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gfsa
from gfsa.kernels import launching, one_pass, op
from gfsa.kernels.launching import Options, Saved, copyable_by_tile, empty_like
from gfsa.kernels.one_pass import Tiles
from gfsa.kernels.op import filter_attention, run_forward
from gfsa.kernels.routes import Kernels
from gfsa.operators import DenseOperator
from support.fused_cases import Problem, error

assert support.triton_interpreter

PROBLEMS = [
    Problem(1, 2, 70, 16),
    Problem(1, 2, 70, 24, is_causal=True, projected=True),
    Problem(1, 1, 130, 64, is_causal=True),
    Problem(1, 4, 20, 16, key_heads=2, is_causal=True, scale=0.7),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def run(problem: Problem, exclusive: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """The output and the logsumexps to base 2, by the kernel and in float64."""
    q, k, v, coeffs, _ = problem.tensors()
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    if not exclusive:
        coeffs = coeffs[:, :2].contiguous()
    options = Options(scale, problem.is_causal, exclusive=exclusive)
    out, u, lse = run_forward("one_pass", q, k, v, coeffs, None, None, options)
    q, k, v, coeffs = (x.double() for x in (q, k, v, coeffs))
    operator = DenseOperator.from_qk(q, k, None, problem.is_causal, scale)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if problem.is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
    exact = scores.logsumexp(-1) / math.log(2)
    share = coeffs[:, 2] if exclusive else None
    got = [out, lse[:, :, 0, : q.shape[2]], u]
    return got, [operator.polynomial(coeffs[:, :2], v, share), exact, operator.apply(v)]


def agrees(got: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(got, expected, strict=True):
        # A·V is kept for the exclusive term alone
        if x.numel():
            assert x.shape == y.shape
            assert (x.double() - y).norm() <= 2e-6 * max(y.norm(), 1e-3)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_agrees_with_the_specification(problem: Problem, exclusive: bool) -> None:
    agrees(*run(problem, exclusive))


def test_one_token() -> None:
    agrees(*run(Problem(1, 1, 1, 8)))


@pytest.fixture
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rows, cols = request.param
    monkeypatch.setattr(one_pass, "tiles", lambda *_: Tiles(rows, cols, 4, 2))
    one_pass._launch.cache_clear()
    yield
    one_pass._launch.cache_clear()


@pytest.mark.parametrize("tiles", [(16, 32), (32, 16)], indirect=True, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.usefixtures("tiles")
def test_tiles_of_any_size(is_causal: bool) -> None:
    agrees(*run(Problem(1, 1, 50, 24, is_causal=is_causal)))


@pytest.mark.parametrize("problem", PROBLEMS[1:2], ids=str)
def test_on_a_gpu_without_a_copy_engine(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """By addresses instead of descriptors the kernels give the same bits."""
    expected, _ = run(problem)
    monkeypatch.setattr(launching, "has_copy_engine", lambda x: False)
    torch.manual_seed(0)
    for x, y in zip(run(problem)[0], expected, strict=True):
        assert torch.equal(x, y)


def test_every_block_of_every_head_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order the programs take them: two heads together, then the one that is left."""
    problem = Problem(1, 3, 70, 16, is_causal=True)
    monkeypatch.setattr(one_pass, "_heads_together", lambda problem: 2)
    one_pass._launch.cache_clear()
    agrees(*run(problem))
    one_pass._launch.cache_clear()


def test_heads_together_fill_the_cache() -> None:
    problem = one_pass.problem_of
    q = torch.empty(8, 12, 1024, 64, dtype=torch.bfloat16, device="meta")
    together = one_pass._heads_together
    assert together(problem(q, q, None, Options(0.1))) == 1
    assert together(problem(q, q, None, Options(0.1, is_causal=True))) == 96
    q = torch.empty(64, 12, 1024, 64, dtype=torch.bfloat16, device="meta")
    assert together(problem(q, q, None, Options(0.1, is_causal=True))) == 96


@pytest.fixture
def dense_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient, whose kernels no interpreter runs, by the specification."""

    def backward(
        g: Tensor, saved: Saved, options: Options
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, u, _, _, coeffs, _, _ = saved
        scale, is_causal, _, exclusive = options
        assert bool(u.numel()) == exclusive
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, v, coeffs)]
            operator = DenseOperator.from_qk(*inputs[:2], None, is_causal, scale)
            share = inputs[3][:, 2] if exclusive else None
            y = operator.polynomial(inputs[3][:, :2], inputs[2], share)
        dq, dk, dv, dc = torch.autograd.grad(y, inputs, g)
        like = [empty_like(x).copy_(dx) for x, dx in ((q, dq), (k, dk), (v, dv))]
        return *like, dc[:, : 2 + exclusive, None].contiguous()

    decided = Kernels("one_pass", "hopper")
    monkeypatch.setitem(op.GRADIENT, "hopper once", backward)
    monkeypatch.setattr(op, "kernels_of", lambda situation: decided)


@pytest.mark.usefixtures("dense_gradient")
def test_a_filter_learns() -> None:
    """θ's gradient, with checkpointing too, is the specification's."""
    q, k, v, _, g = Problem(2, 3, 20, 16, is_causal=True, projected=True).tensors()
    layer = gfsa.GFSA(3, K=None, w0=0.2, w1=0.7)
    inputs = [x.requires_grad_() for x in (q, k, v)] + [layer.theta]
    options = Options(0.25, is_causal=True)

    def eager(q: Tensor, k: Tensor, v: Tensor, theta: Tensor) -> Tensor:
        return filter_attention(
            q, k, v, layer.polynomial_coefficients(), None, None, options, once=True
        )

    def dense(q: Tensor, k: Tensor, v: Tensor, theta: Tensor) -> Tensor:
        return layer(DenseOperator.from_qk(q, k, None, True, 0.25), v)

    def checkpointed(*inputs: Tensor) -> Tensor:
        return checkpoint(eager, *inputs, use_reentrant=False)

    expected = [*torch.autograd.grad(dense(*inputs), inputs, g)]
    for work in (eager, checkpointed):
        for x, y in zip(torch.autograd.grad(work(*inputs), inputs, g), expected, strict=True):
            assert error(x, y) <= 2e-6, work.__name__


@pytest.mark.usefixtures("dense_gradient")
def test_operator_registration() -> None:
    q, k, v = torch.randn(3, 1, 20, 2, 16).transpose(2, 3).unbind(0)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for exclusive in (False, True):
        given = (q, k, v, torch.randn(2, 2), *([torch.randn(2)] if exclusive else []))
        inputs = [x.requires_grad_() for x in given]
        share = () if exclusive else (None,)
        arguments = (*inputs, *share, None, None, 0.25, True, 0.0, True, True)
        torch.library.opcheck(op.forward, arguments, test_utils=checks)


def test_contiguous_and_off_the_border() -> None:
    """A view into a buffer may be contiguous and begin anywhere."""
    x = torch.randn(1 + 2 * 3 * 5 * 16)[1:].view(2, 3, 5, 16)
    assert x.is_contiguous()
    assert x.data_ptr() % 16
    y = copyable_by_tile(x)
    assert y.data_ptr() % 16 == 0
    assert torch.equal(x, y)
