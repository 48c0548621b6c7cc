"""The gradient by two of cuDNN's, a stand-in for cuDNN on the CPU and ours in the interpreter.

Not collected by itself: ``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

from typing import Any

import pytest
import torch
from torch import Tensor

import support.cudnn_on_cpu
from gfsa.kernels import autograd
from gfsa.kernels.autograd import filter_attention
from gfsa.kernels.long import cudnn_backward, tile_sizes
from gfsa.kernels.long import launch as long
from gfsa.kernels.problem import Options, Saved
from gfsa.operators import DenseOperator
from support.fused_cases import NAMES, Problem, error, run

assert support.triton_interpreter
assert support.cudnn_on_cpu

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _always_by_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call goes this way, through the forward pass of any length on small tiles."""
    torch.manual_seed(0)
    cudnn_backward.pieces.cache_clear()
    monkeypatch.setattr(long, "cudnn_would_run", lambda *call: True)
    monkeypatch.setattr(cudnn_backward, "SHORTEST", 1)
    monkeypatch.setattr(cudnn_backward, "multiprocessors", lambda device: 132)
    monkeypatch.setitem(tile_sizes.TILES, "combine", {128: tile_sizes.Tiles(16, 32, 4, 2)})


def fill_with(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that so many heads of all sequences keep busy, each one being a tile long."""
    monkeypatch.setattr(cudnn_backward, "BUSY", float(pairs))
    monkeypatch.setattr(cudnn_backward, "multiprocessors", lambda device: 1)


@pytest.mark.parametrize("pairs", [1, 2, 4, 100])
@pytest.mark.parametrize(
    "problem",
    [
        Problem(3, 4, 70, 72),
        Problem(3, 4, 70, 72, is_causal=True, projected=True),
        Problem(2, 3, 33, 80, projected=True, scale=0.3),
        Problem(1, 1, 65, 128, is_causal=True),
    ],
    ids=str,
)
def test_agrees_with_the_specification(
    problem: Problem, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All heads at once, some sequences at a time, and some heads of one sequence at a time."""
    fill_with(pairs, monkeypatch)
    got, expected = run(problem)
    for name, x, y in zip(NAMES, got, expected, strict=True):
        assert x.shape == y.shape, name
        assert error(x, y) <= 2e-6, name


def test_the_registered_operator_goes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_with(2, monkeypatch)
    q, k, v, coeffs, g = Problem(2, 4, 40, 72, projected=True).tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]
    torch.library.opcheck(autograd.forward, (*inputs, None, None, 0.0, True, 0.1))

    def step(*inputs: Tensor) -> Tensor:
        return filter_attention(*inputs, None, None, Options(0.1, True))

    calls = []
    monkeypatch.setattr(cudnn_backward, "backward", counted(cudnn_backward.backward, calls))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    mine, theirs = (torch.autograd.grad(f(*inputs), inputs, g) for f in (step, compiled))
    assert len(calls) == 2
    for name, x, y in zip(NAMES[1:], mine, theirs, strict=True):
        assert torch.equal(x, y), name
        assert x.stride() == y.stride(), name


def counted(function: Any, calls: list[Any]) -> Any:
    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    return call


@pytest.mark.parametrize("pairs", [1, 100])
@pytest.mark.parametrize("layout", ["packed", "heads first of all"])
def test_any_layout(layout: str, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values of one tensor, whose gradients lie as the tokens do."""
    fill_with(pairs, monkeypatch)
    if layout == "packed":
        q, k, v = torch.randn(2, 40, 3, 4, 72).permute(2, 0, 3, 1, 4)
    else:
        q, k, v = torch.randn(3, 4, 2, 40, 72).transpose(1, 2)
    # a gradient in another layout than the tokens'
    coeffs, g = torch.randn(4, 3), torch.randn(2, 4, 40, 72)
    results = []
    for inputs in ([q, k, v, coeffs], [x.clone() for x in (q, k, v, coeffs)]):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = filter_attention(*inputs, None, None, Options(0.1))
        results.append([out, *torch.autograd.grad(out, inputs, g)])
    for name, mine, other in zip(NAMES, *results, strict=True):
        assert error(mine, other) <= 2e-6, name
    tokens_first = layout == "packed"
    for x in results[0][:4]:
        assert (x.transpose(1, 2) if tokens_first else x).is_contiguous()


def saved(problem: Problem, coeffs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What a backward pass is given, rounded as the forward pass does, and what is exact."""
    q, k, v, _, g = problem.tensors()
    exact = [x.double().requires_grad_() for x in (q, k, v, coeffs)]
    a = DenseOperator.from_qk(exact[0], exact[1], None, problem.is_causal)
    expected = torch.autograd.grad(a.polynomial(exact[3], exact[2]), exact, g.double())
    u, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, problem.is_causal, False
    )
    c0, c1, c2 = coeffs.double().T[:, :, None, None].detach()
    out = (c0 * v.double() + c1 * u.double() + c2 * a.apply(u.double())).detach().to(q.dtype)
    return [g, q, k, v, u, out, lse[..., 0], coeffs], list(expected)


def relative_errors(problem: Problem, coeffs: Tensor) -> dict[str, float]:
    given, expected = saved(problem, coeffs)
    options = Options(problem.head_dim**-0.5, problem.is_causal)
    *got, parts = cudnn_backward.backward(given[0], Saved(*given[1:]), options)
    got.append(parts.sum(2))
    assert all(torch.isfinite(x).all() for x in got)
    return {name: error(x, y) for name, x, y in zip(NAMES[1:], got, expected, strict=True)}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("c2", [0.0, 1e-30, 1e-7, 3e-5, 2**-13, 1e-3, 0.02, 0.7])
def test_the_output_tells_the_second_pass(c2: float, dtype: torch.dtype) -> None:
    """However small its coefficient, of either sign: within the rounding of what is given."""
    problem = Problem(1, 4, 70, 72, is_causal=True, dtype=dtype)
    coeffs = torch.tensor([[0.3, 0.9, c2], [0.0, 1.0, -c2], [-0.4, 1.2, c2], [0.1, -0.8, -c2]])
    found = relative_errors(problem, coeffs)
    eps = torch.finfo(dtype).eps
    assert max(found["dq"], found["dk"], found["dv"]) <= eps, found
    assert found["dc"] <= 2 * eps, found


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_second_pass_of_weight_zero_says_nothing(dtype: torch.dtype) -> None:
    """Then q's and k's gradients are those of the first attention alone, to the bit."""
    # halves and ones, so that c1·g is exact
    coeffs = torch.tensor([[0.3, 0.5, 0.0], [0.0, 1.0, -0.0]])
    given, _ = saved(Problem(2, 2, 70, 72, dtype=dtype), coeffs)
    g, q, k, v, u, _, lse, _ = given
    options = Options(72**-0.5)
    dq, dk, dv, parts = cudnn_backward.backward(given[0], Saved(*given[1:]), options)
    du = (coeffs[:, 1, None, None] * g.float()).to(dtype)
    first = cudnn_backward.attention_gradient(du, q, k, v, u, lse, options)
    assert torch.equal(dq, first[0])
    assert torch.equal(dk, first[1])
    assert error(dv, first[2].double() + coeffs[:, 0, None, None] * g.double()) <= 5e-3
    # while the coefficient itself learns
    assert (parts.sum(2)[:, 2] != 0).all()


@pytest.mark.parametrize("c2", [0.0, 1e-9, -1e-4, 0.5])
def test_large_float16_values_stay_finite(c2: float) -> None:
    problem = Problem(1, 1, 70, 72, dtype=torch.float16)
    coeffs = torch.tensor([[0.1, 0.9, c2]])
    given, _ = saved(problem, coeffs)
    g, q, k, v, u, out, *rest = given
    grown = [3e4 / 4 * x for x in (v, u, out)]
    kept = Saved(q, k, *grown, *rest)
    for x in cudnn_backward.backward(g / 5e4, kept, Options(72**-0.5)):
        assert torch.isfinite(x).all()
