"""The causal kernels of one sweep on the CPU, statement by statement, in Triton's interpreter.

Not collected by itself: ``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

import pytest
import torch
from torch import Tensor

from gfsa.operators import DenseOperator
from gfsa.operators.fused.causal import sweep
from gfsa.operators.fused.causal.plan import ColumnPlan, RowPlan
from gfsa.operators.fused.kernel import copyable_by_tile
from gfsa.operators.fused.passes import Options
from support.fused_cases import NAMES, Problem, error

assert support.triton_interpreter

ROWS = [RowPlan(32, 32, 4, 2, True), RowPlan(32, 16, 4, 2, False), RowPlan(32, 16, 4, 2, True)]
Columns = tuple[ColumnPlan, ...]
COLUMNS: list[Columns] = [
    (ColumnPlan(32, 32, 4, 2, True, 1),),
    (ColumnPlan(32, 16, 4, 2, True, 2),),
    (ColumnPlan(32, 16, 4, 2, False),),
    (ColumnPlan(16, 16, 4, 2, True, 3, atomic=True),),
    (
        ColumnPlan(32, 16, 4, 2, False, scores=False),
        ColumnPlan(16, 16, 4, 2, False, values=False),
    ),
    (
        ColumnPlan(32, 16, 4, 2, True, scores=False),
        ColumnPlan(32, 32, 4, 2, True, 1, values=False, atomic=True),
    ),
]
CASES = [
    Problem(1, 2, 33, 16, is_causal=True),
    Problem(2, 1, 96, 32, is_causal=True, projected=True),
    Problem(1, 4, 70, 16, 2, is_causal=True),
    Problem(2, 4, 50, 24, 1, is_causal=True, projected=True),
    Problem(1, 1, 100, 8, is_causal=True, scale=0.7),
    Problem(1, 1, 40, 72, is_causal=True),
    Problem(1, 2, 1, 16, is_causal=True),
    Problem(2, 1, 128, 16, is_causal=True),
]


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def run(problem: Problem, rows: RowPlan, columns: Columns) -> tuple[list[Tensor], list[Tensor]]:
    """What the kernels give for one call, and what the specification gives in float64."""
    q, k, v, coeffs, g = problem.tensors()
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    options = Options(scale, True)
    tokens = [copyable_by_tile(x) for x in (q, k, v)]
    out, u, lse = sweep.forward(*tokens, coeffs, options, rows)
    *gradients, parts = sweep.backward(
        copyable_by_tile(g), *tokens, u, out, lse, coeffs, options, columns
    )
    got = [out, *gradients, parts.sum(2)]
    exact = [x.double().requires_grad_() for x in (q, k, v, coeffs)]
    operator = DenseOperator.from_qk(exact[0], exact[1], None, True, scale)
    expected_out = operator.polynomial(exact[3], exact[2])
    expected = [expected_out, *torch.autograd.grad(expected_out, exact, g.double())]
    return got, [x.detach() for x in expected]


@pytest.mark.parametrize("plan", ROWS, ids=str)
@pytest.mark.parametrize("problem", CASES, ids=str)
def test_forward_agrees_with_the_specification(problem: Problem, plan: RowPlan) -> None:
    q, k, v, coeffs, _ = problem.tensors()
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    tokens = [copyable_by_tile(x) for x in (q, k, v)]
    out, u, lse = sweep.forward(*tokens, coeffs, Options(scale, True), plan)
    exact = [x.double() for x in (q, k, v, coeffs)]
    operator = DenseOperator.from_qk(exact[0], exact[1], None, True, scale)
    assert error(u, operator.apply(exact[2])) <= 2e-6
    assert error(out, operator.polynomial(exact[3], exact[2])) <= 2e-6
    keys = exact[1].repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = exact[0] @ keys.transpose(2, 3) * scale
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    assert error(lse, scores.masked_fill(hidden, -torch.inf).logsumexp(3)) <= 2e-6
    assert out.stride() == u.stride()


@pytest.mark.parametrize("plan", COLUMNS, ids=str)
@pytest.mark.parametrize("problem", CASES, ids=str)
def test_backward_agrees_with_the_specification(problem: Problem, plan: Columns) -> None:
    got, expected = run(problem, ROWS[0], plan)
    size = max(x.norm().item() for x in expected)
    for name, x, y in zip(NAMES, got, expected, strict=True):
        assert x.shape == y.shape, name
        # a gradient that is zero but for rounding has no relative error of its own
        negligible = (x.double() - y).norm().item() <= 1e-6 * size
        assert negligible or error(x, y) <= 2e-6, (name, error(x, y))


@pytest.mark.parametrize("plan", COLUMNS, ids=str)
def test_halves_are_as_exact_as_their_rounding(plan: Columns) -> None:
    """In float16: the interpreter multiplies bfloat16 numbers as if they were integers."""
    problem = Problem(1, 2, 70, 16, 1, is_causal=True, dtype=torch.float16)
    got, expected = run(problem, ROWS[1], plan)
    eps = torch.finfo(torch.float16).eps
    for name, x, y in zip(NAMES, got, expected, strict=True):
        assert error(x, y) <= eps, (name, error(x, y))


def test_memory_beyond_the_tensors_is_never_used() -> None:
    sea = torch.full((4, 1, 2, 60, 16), float("nan"))
    inside = sea[..., 7 : 7 + 37, :]
    inside.copy_(torch.randn(inside.shape))
    q, k, v, g = inside.unbind(0)
    coeffs, options = torch.randn(2, 3), Options(0.25, True)
    for rows, columns in zip(ROWS, COLUMNS, strict=False):
        out, u, lse = sweep.forward(q, k, v, coeffs, options, rows)
        gradients = sweep.backward(g, q, k, v, u, out, lse, coeffs, options, columns)
        for x in (out, u, lse, *gradients):
            assert torch.isfinite(x).all()


@pytest.mark.parametrize("columns", COLUMNS, ids=str)
def test_logsumexps_far_below_zero(columns: Columns) -> None:
    """Where the probability of a key beyond the last one overflows."""
    q = torch.full((1, 1, 37, 16), -6.0)
    k, v, g, coeffs = -q, torch.randn_like(q), torch.randn_like(q), torch.ones(1, 3)
    options = Options(1.0, True)
    out, u, lse = sweep.forward(q, k, v, coeffs, options, ROWS[0])
    for x in (out, *sweep.backward(g, q, k, v, u, out, lse, coeffs, options, columns)):
        assert torch.isfinite(x).all()
