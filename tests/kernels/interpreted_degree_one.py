"""Filters of degree 1: the kernels around torch's attention, and the operator of one sweep.

The kernels of one sweep are Gluon's.

Not collected by itself: ``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gfsa
from gfsa.kernels import op, sweep
from gfsa.kernels.degree_one import combine_degree_one
from gfsa.kernels.launching import Inputs, Options, Saved, empty_like
from gfsa.kernels.op import FusedOperator, filter_attention
from gfsa.kernels.routes import Kernels
from gfsa.operators import AttentionCall, DenseOperator
from support.fused_cases import (
    NAMES,
    Problem,
    assert_learns_by_the_kernels,
    error,
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


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize(("per_head", "share"), [(True, None), (False, 0.7), (True, "per head")])
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


@pytest.fixture
def dense_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep and its gradient, whose kernels no interpreter runs, by the specification."""

    def forward(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, coeffs, _, _, (scale, is_causal, *_), keeps, share = given
        operator = DenseOperator.from_qk(q, k, None, is_causal, scale)
        rooms = sweep.kept(q, share is not None and keeps)
        u = rooms["u"]()
        if u.numel():
            u.copy_(operator.apply(v))
        out = operator.polynomial(coeffs[:, :2], v, share)
        return empty_like(q).copy_(out), u, rooms["lse"]()

    def backward(
        g: Tensor, saved: Saved, options: Options
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, u, _, _, coeffs, _, _, share = saved
        scale, is_causal, _, exclusive, _ = options
        assert bool(u.numel()) == exclusive

        def by_autograd() -> tuple[Tensor, ...]:
            inputs = [x.detach().requires_grad_() for x in (q, k, v, coeffs)]
            shares = [] if share is None else [share.detach().requires_grad_()]
            operator = DenseOperator.from_qk(*inputs[:2], None, is_causal, scale)
            y = operator.polynomial(inputs[3][:, :2], inputs[2], *shares)
            return torch.autograd.grad(y, inputs + shares, g)

        # within a registered operator autograd is off, but not in other threads
        with ThreadPoolExecutor(1) as pool:
            dq, dk, dv, dc, *da = pool.submit(by_autograd).result()
        like = [empty_like(x).copy_(dx) for x, dx in ((q, dq), (k, dk), (v, dv))]
        return *like, torch.stack([dc[:, 0], dc[:, 1], *da], 1)[:, :, None]

    decided = Kernels("one_sweep", "hopper")
    monkeypatch.setitem(op.FORWARD, "one_sweep", forward)
    monkeypatch.setitem(op.GRADIENT, "hopper once", backward)
    monkeypatch.setattr(op, "kernels_of", lambda situation: decided)


@pytest.mark.usefixtures("dense_sweep")
def test_a_filter_learns_in_one_pass() -> None:
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


@pytest.mark.usefixtures("dense_sweep")
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("learned", [(), (3,), (4,), (3, 4)], ids=str)
def test_what_is_not_learned_has_no_gradient(learned: tuple[int, ...], registered: bool) -> None:
    """Neither coefficients nor shares, one of them or both; a share need not be dense."""
    q, k, v, coeffs, g = Problem(1, 2, 20, 16, is_causal=True).tensors()
    tensors = [q, k, v, coeffs[:, :2], torch.randn(2, 3)[:, 1]]
    inputs = [x.requires_grad_(i < 3 or i in learned) for i, x in enumerate(tensors)]
    options = Options(0.25, is_causal=True, exclusive=True)
    if registered:
        out, *_ = op.forward(*inputs, None, None, *options[:3], True, True)
    else:
        out = filter_attention(*inputs[:4], None, None, options, once=True, share=inputs[4])
    dense = DenseOperator.from_qk(q, k, None, True, 0.25).polynomial(inputs[3], v, inputs[4])
    wanted = [x for x in inputs if x.requires_grad]
    results = (torch.autograd.grad(y, wanted, g) for y in (out, dense))
    for x, y in zip(*results, strict=True):
        assert error(x, y) <= 2e-6


@pytest.mark.usefixtures("dense_sweep")
def test_registration_of_one_pass() -> None:
    q, k, v = torch.randn(3, 1, 20, 2, 16).transpose(2, 3).unbind(0)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for exclusive in (False, True):
        given = (q, k, v, torch.randn(2, 2), *([torch.randn(2)] if exclusive else []))
        inputs = [x.requires_grad_() for x in given]
        share = () if exclusive else (None,)
        arguments = (*inputs, *share, None, None, 0.25, True, 0.0, True, True)
        torch.library.opcheck(op.forward, arguments, test_utils=checks)
