"""What each way to compute a filter promises: any layout, graphs, checkpoints, one derivative.

Not collected by itself: ``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gfsa.kernels import launching, op
from gfsa.kernels.launching import Options, copyable_by_tile
from gfsa.kernels.op import FusedOperator, filter_attention
from gfsa.operators import AttentionCall, SDPAOperator
from support.fused_cases import NAMES, Problem, assert_same_bits, error, outcome, run

assert support.triton_interpreter

Work = Callable[..., Tensor]


def two_passes(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
    return filter_attention(q, k, v, coeffs, None, None, Options(0.25))


def around_torch(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
    return FusedOperator(AttentionCall(q, k, scale=0.25)).polynomial(coeffs[:, :2], v)


@pytest.fixture(params=[two_passes, around_torch])
def work(request: pytest.FixtureRequest) -> Work:
    found: Work = request.param
    return found


@pytest.mark.parametrize("layout", ["expanded", "features apart", "off the border", "packed"])
def test_any_layout(work: Work, layout: str) -> None:
    """What the copy engine cannot take is copied first."""
    given = {
        "expanded": lambda: torch.randn(1, 1, 20, 16).expand(1, 2, 20, 16),
        "features apart": lambda: torch.randn(1, 2, 16, 20).transpose(2, 3),
        "off the border": lambda: torch.randn(1, 2, 20, 17)[..., 1:],
        "packed": lambda: torch.randn(1, 20, 3, 2, 16).permute(2, 0, 3, 1, 4)[2],
    }[layout]
    *tokens, g = (given() for _ in range(4))
    coeffs, results = torch.randn(2, 3), []
    for inputs in ((*tokens, coeffs), (*(x.clone() for x in tokens), coeffs)):
        results.append(outcome(work, [x.detach().requires_grad_() for x in inputs], g))
    assert_same_bits(*results)


def test_contiguous_and_off_the_border() -> None:
    """A view into a buffer may be contiguous and begin anywhere."""
    x = torch.randn(1 + 2 * 3 * 5 * 16)[1:].view(2, 3, 5, 16)
    assert x.is_contiguous()
    assert x.data_ptr() % 16
    y = copyable_by_tile(x)
    assert y.data_ptr() % 16 == 0
    assert torch.equal(x, y)


def test_compiled_whole(work: Work) -> None:
    *inputs, g = Problem(1, 2, 18, 16, projected=True).tensors()
    inputs = [x.requires_grad_() for x in inputs]

    def step(*inputs: Tensor) -> Tensor:
        return work(*inputs) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for x, y in zip(outcome(step, inputs, g), outcome(compiled, inputs, g), strict=True):
        # the compiler combines the powers around torch's attention by itself
        assert torch.equal(x, y) if work is two_passes else error(x, y) <= 2e-6


@pytest.mark.parametrize("powers", [2, 3])
def test_checkpointing_and_dropout(powers: int) -> None:
    """Recomputing the forward draws the same dropout mask again; with degree 1 it is torch's."""
    *inputs, _, g = Problem(1, 2, 40, 16).tensors()
    coeffs = torch.tensor([0.2, 0.9, 0.3])[:powers]
    inputs = [x.requires_grad_() for x in (*inputs, coeffs)]

    def by(operator: Any, q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
        call = AttentionCall(q, k, dropout_p=0.3, is_causal=True)
        found: Tensor = operator(call).polynomial(c, v)
        return found

    results = []
    for work in (
        lambda *x: by(FusedOperator, *x),
        lambda *x: checkpoint(by, FusedOperator, *x, use_reentrant=False),
        lambda *x: by(SDPAOperator, *x),
    ):
        torch.manual_seed(5)
        results.append(outcome(work, inputs, g))
    kept, again, plain = results
    assert_same_bits(kept, again)
    assert kept[-1].shape == (powers,)
    if powers == 2:
        for name, x, y in zip(NAMES, kept, plain, strict=True):
            assert error(x, y) <= 2e-6, name


def test_no_second_derivative_in_silence(work: Work) -> None:
    inputs = [x.requires_grad_() for x in Problem(1, 1, 16, 16).tensors()[:4]]
    (dc,) = torch.autograd.grad(work(*inputs).sum(), inputs[3:], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(dc.sum(), inputs[:1])


def test_operator_registration() -> None:
    inputs = [x.requires_grad_() for x in Problem(1, 2, 18, 16, 1, projected=True).tensors()[:4]]
    mask, seed = torch.rand(1, 1, 1, 18) < 0.8, torch.tensor([3])
    torch.library.opcheck(op.forward, (*inputs, None, mask, seed, 0.25, True, 0.1, False, True))


@pytest.mark.parametrize(
    ("compute", "problem"),
    [
        (lambda x: run(x)[0], Problem(1, 2, 70, 24, is_causal=True, projected=True)),
        (lambda x: run(x)[0], Problem(2, 2, 40, 16, mask="keys", key_heads=1)),
    ],
    ids=["two passes", "grouped heads"],
)
def test_on_a_gpu_without_a_copy_engine(
    compute: Callable[[Problem], list[Tensor]], problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By addresses instead of descriptors the kernels give the same bits."""
    torch.manual_seed(0)
    expected = compute(problem)
    monkeypatch.setattr(launching, "has_copy_engine", lambda x: False)
    torch.manual_seed(0)
    assert_same_bits(compute(problem), expected)
