"""The gradient of degree 1 by cuDNN's, a stand-in for cuDNN on the CPU and ours in the interpreter.

Not collected by itself: ``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import support.cudnn_on_cpu
from gfsa.kernels import one_pass, op
from gfsa.kernels.launching import Options, Saved
from gfsa.operators import DenseOperator
from support.fused_cases import NAMES, Problem

assert support.triton_interpreter
assert support.cudnn_on_cpu

PROBLEMS = [
    Problem(2, 3, 70, 128, is_causal=True),
    Problem(1, 6, 65, 128, key_heads=2, is_causal=True, projected=True, scale=0.3),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """``A·V`` and natural logsumexps, as the sweep saves them."""
    u, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, options.is_causal, False, scale=options.scale
    )
    return u, lse.view(q.shape[:3])


def exact(
    problem: Problem, tensors: list[Tensor], g: Tensor, exclusive: bool = False
) -> list[Tensor]:
    """The filter and its gradients by the specification in float64, as NAMES."""
    inputs = [x.detach().double().requires_grad_() for x in tensors]
    operator = DenseOperator.from_qk(*inputs[:2], None, problem.is_causal, problem.scale)
    share = inputs[3][:, 2] if exclusive else None
    out = operator.polynomial(inputs[3][:, :2], inputs[2], share)
    return [out, *torch.autograd.grad(out, inputs, g.double())]


@pytest.mark.parametrize(("powers", "exclusive"), [(2, False), (3, False), (3, True)])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_gradient(problem: Problem, powers: int, exclusive: bool) -> None:
    q, k, v, coeffs, g = problem.tensors()
    scale = problem.scale or problem.head_dim**-0.5
    options = Options(scale, problem.is_causal, exclusive=exclusive)
    expected = exact(problem, [q, k, v, coeffs[:, : 2 + exclusive]], g, exclusive)
    u, lse = attend(q, k, v, options)
    numbers = coeffs[:, :powers].contiguous()
    *got, parts = one_pass.gradient_by_cudnn(g, Saved(q, k, v, u, g, lse, numbers), options)
    for name, x, y in zip(NAMES[1:], [*got, parts.sum(2)], expected[1:], strict=True):
        assert x.shape == y.shape, name
        assert (x.double() - y).norm() <= 2e-6 * y.norm(), name


@pytest.mark.parametrize("projected", [False, True])
def test_gradients_lie_as_the_compiler_expects(projected: bool) -> None:
    """Also those that torch's gradient gives."""
    problem = Problem(1, 4, 20, 128, key_heads=2, projected=projected, is_causal=True)
    q, k, v, coeffs, g = problem.tensors()
    u, lse = attend(q, k, v, Options(0.1, True))
    saved = (q, k, v, u, g, lse, coeffs[:, :2].contiguous(), None, None)
    options = (0.1, True, 0.0, False, True, "cudnn")

    def work() -> list[tuple[int, ...]]:
        return [x.stride() for x in op.backward(g, *saved, *options)]

    found = work()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert work() == found
