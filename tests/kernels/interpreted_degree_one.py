"""Filters of degree 1, their kernels in the interpreter around torch's attention on the CPU.

Not collected by itself: ``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gfsa
from gfsa.kernels import routes
from gfsa.kernels.degree_one import combine_degree_one
from gfsa.kernels.op import FusedOperator
from gfsa.operators import AttentionCall, DenseOperator, SDPAOperator
from support.fused_cases import (
    NAMES,
    Problem,
    assert_learns_by_the_kernels,
    assert_same_bits,
    error,
    outcome,
)

assert support.triton_interpreter

PROBLEMS = [
    Problem(2, 3, 70, 16),
    Problem(2, 3, 70, 24, is_causal=True, projected=True),
    Problem(3, 2, 64, 72, mask="keys"),
    Problem(1, 2, 65, 16, mask="full"),
    Problem(1, 1, 1, 8, scale=-0.3),
    Problem(2, 6, 70, 16, key_heads=2, is_causal=True, projected=True),
    Problem(3, 4, 40, 72, key_heads=1, mask="keys"),
    # by the kernels of degree 2
    Problem(3, 2, 70, 16, mask="keys", is_causal=True),
    Problem(2, 4, 40, 72, key_heads=2, mask="keys", is_causal=True, projected=True),
]


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    # there is no GPU to ask
    monkeypatch.setattr(routes, "capability", lambda device: (9, 0))
    torch.manual_seed(0)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("share", [None, 0.7, "per head"])
@pytest.mark.parametrize("per_head", [False, True])
def test_agrees_with_the_specification(
    problem: Problem, per_head: bool, share: float | str | None
) -> None:
    q, k, v, coeffs, g = problem.tensors()
    # a token without a direction of its own
    v[0, 0, 0] = 0.0
    exclusive = [torch.randn(problem.heads) if share == "per head" else torch.tensor(share or 0.0)]
    coeffs = coeffs[:, :2] if per_head else torch.tensor([0.3, 0.8])
    mask, options = problem.bool_mask(), {"is_causal": problem.is_causal, "scale": problem.scale}
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs, *exclusive[: share is not None])]
    call = AttentionCall(q, k, mask, enable_gqa=problem.key_heads > 0, **options)
    out = FusedOperator(call).polynomial(coeffs, v, *inputs[4:])
    got = [out, *torch.autograd.grad(out, inputs, g)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    dense = DenseOperator.from_qk(*exact[:2], mask, **options)
    out = dense.polynomial(exact[3], exact[2], *exact[4:])
    expected = [out, *torch.autograd.grad(out, exact, g.double())]
    # the gradient of q vanishes where there is one token, but for the rounding of torch's attention
    rounding = torch.finfo(torch.float32).eps * max(y.norm() for y in expected)
    for name, x, y in zip((*NAMES, "da"), got, expected, strict=False):
        assert x.shape == y.shape, name
        most = 2e-6 * max(y.norm(), 1e-3) if y.any() else rounding
        assert (x.double() - y).norm() <= most, name


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_filter_learns_by_the_kernels(heads: int, exclusive: bool) -> None:
    """The coefficients and θ's gradient by kernels are those that torch works out."""
    layer = gfsa.GFSA(heads, K=None, w0=0.2, w1=0.7)
    if exclusive:
        layer.exclude(0.6, learn=True)
    assert layer.degree == 1
    problem = Problem(3, heads, 70, 16, is_causal=True, projected=True)
    assert_learns_by_the_kernels(layer, problem)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_at_initialisation_has_attentions_bits(dtype: torch.dtype) -> None:
    q, k, v, _, g = Problem(2, 2, 40, 16, dtype=dtype, projected=True).tensors()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    results = []
    for y in (
        FusedOperator(AttentionCall(q, k)).polynomial(torch.tensor([0.0, 1.0]), v),
        F.scaled_dot_product_attention(q, k, v),
    ):
        assert y.dtype == dtype
        results.append([y.detach(), *torch.autograd.grad(y, inputs, g)])
    for name, mine, plain in zip(NAMES, *results, strict=False):
        assert torch.equal(mine, plain), name


@pytest.mark.parametrize("size", [0.0, 1e-25, 1e25, float("inf")])
def test_a_token_without_a_direction_keeps_what_it_gathered(size: float) -> None:
    """Where the square of v is 0 or not finite, p is 0, in the gradient too."""
    v, u, g = torch.randn(3, 1, 1, 40, 16)
    v[0, 0, 3] = size
    coeffs = torch.tensor([[0.5, 0.9]])
    results = []
    for share in (torch.tensor([0.8]), None):
        inputs = [x.clone().requires_grad_() for x in (v, u, coeffs)]
        out = combine_degree_one(*inputs, share)
        results.append([out, *torch.autograd.grad(out, inputs[:2], g)])
    for mine, plain in zip(*results, strict=True):
        assert torch.equal(mine[0, 0, 3], plain[0, 0, 3])
        assert not torch.equal(mine[0, 0, 4], plain[0, 0, 4])


def test_rounded_once() -> None:
    """The sum is made in float32: what vanishes beside c1·U in 16 bits is not lost before."""
    v, u = torch.randn(2, 1, 2, 40, 16).half().unbind(0)
    coeffs = torch.tensor([[0.1, 1.0], [0.03, -0.7]])
    exact = coeffs[:, 0, None, None] * v.double() + coeffs[:, 1, None, None] * u.double()
    off = (combine_degree_one(v, u, coeffs).double() - exact).abs()
    assert (off <= 2**-11 * 1.001 * exact.abs() + 2**-25).all()


@pytest.mark.parametrize("layout", ["expanded", "features apart", "off the border", "packed"])
def test_any_layout(layout: str) -> None:
    given = {
        "expanded": lambda: torch.randn(1, 1, 20, 16).expand(1, 2, 20, 16),
        "features apart": lambda: torch.randn(1, 2, 16, 20).transpose(2, 3),
        "off the border": lambda: torch.randn(1, 2, 20, 17)[..., 1:],
        "packed": lambda: torch.randn(1, 20, 3, 2, 16).permute(2, 0, 3, 1, 4)[2],
    }[layout]
    v, u, g, coeffs = given(), given(), given(), torch.randn(2, 2)
    results = []
    for x, y in ((v, u), (v.clone(), u.clone())):
        inputs = [each.detach().requires_grad_() for each in (x, y, coeffs)]
        results.append(outcome(combine_degree_one, inputs, g))
    assert_same_bits(*results)


def test_compiled_whole() -> None:
    q, k, v, coeffs, g = Problem(1, 2, 18, 16, projected=True).tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs[:, :2])]

    def step(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
        return FusedOperator(AttentionCall(q, k, is_causal=True)).polynomial(coeffs, v) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for x, y in zip(outcome(step, inputs, g), outcome(compiled, inputs, g), strict=True):
        assert error(x, y) <= 2e-6


def test_checkpointing_and_dropout() -> None:
    """Recomputing the forward draws the same dropout mask again, which is torch's."""
    q, k, v, coeffs, g = Problem(1, 2, 40, 16).tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs[:, :2])]

    def run(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
        return FusedOperator(AttentionCall(q, k, dropout_p=0.3)).polynomial(c, v)

    def by_torch(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
        return SDPAOperator(AttentionCall(q, k, dropout_p=0.3)).polynomial(c, v)

    results = []
    for work in (run, lambda *x: checkpoint(run, *x, use_reentrant=False), by_torch):
        torch.manual_seed(5)
        results.append(outcome(work, inputs, g))
    kept, again, plain = results
    for name, x, y, z in zip(NAMES, kept, again, plain, strict=True):
        assert torch.equal(x, y), name
        assert error(x, z) <= 2e-6, name


def test_no_second_derivative_in_silence() -> None:
    inputs = [x.requires_grad_() for x in (*torch.randn(2, 1, 1, 16, 16), torch.rand(1, 2))]
    out = combine_degree_one(*inputs)
    (dv,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(dv.sum(), inputs[:1])
