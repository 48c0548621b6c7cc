"""dQ, dK and dV from one kernel on a GPU: as exact as torch's, and what separate kernels give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from gfsa.kernels import hopper, routes
from gfsa.kernels.launching import Options, Saved, problem_of
from gfsa.kernels.op import kernels_for, run_backward, run_forward
from support.capturing import captured
from support.fused_cases import Problem, assert_as_exact_as_attention, error

BF16, FP16 = torch.bfloat16, torch.float16

if routes.capability(torch.device("cuda")) != (9, 0) or routes.TRITON != routes.MEASURED_TRITON:
    pytest.skip("needs a Hopper GPU and Triton 3.6", allow_module_level=True)


@pytest.fixture(autouse=True)
def _for_any_shape(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shapes that the kernel can serve, not the measured ones alone; launches are not kept."""
    monkeypatch.setattr(hopper, "LEAST_WITH_QUERIES", 1)
    hopper._launches.cache_clear()
    yield
    hopper._launches.cache_clear()


def wide(*shape: int, **options: object) -> Problem:
    return Problem(*shape, **{"dtype": BF16, "is_causal": True, "device": "cuda", **options})  # type: ignore[arg-type]


def saved_by(problem: Problem) -> tuple[Tensor, Saved, Options]:
    """The output's gradient and what the forward pass saves."""
    q, k, v, coeffs, g = problem.tensors()
    options = Options(problem.head_dim**-0.5, problem.is_causal)
    assert kernels_for(q, None, options).gradient == "hopper"
    assert hopper.adds_up_queries(problem_of(q, k, None, options))
    out, u, lse = run_forward("two_pass", q, k, v, coeffs, None, None, options)
    return g, Saved(q, k, v, u, out, lse, coeffs), options


def by_separate_kernels(g: Tensor, saved: Saved, options: Options) -> tuple[Tensor, ...]:
    torch.use_deterministic_algorithms(True)
    try:
        return run_backward("hopper", g, saved, options)
    finally:
        torch.use_deterministic_algorithms(False)


CASES = [
    wide(2, 4, 1024, 128),
    wide(2, 4, 1024, 128, 2, dtype=FP16, projected=True),
    wide(1, 6, 1100, 128, 1, dtype=FP16),
    wide(3, 3, 300, 128, projected=True, scale=-0.2),
    wide(3, 2, 324, 128, scale=0.3),
    wide(2, 3, 64, 128),
    wide(2, 3, 132, 128, dtype=FP16),
    wide(1, 2, 4100, 128),
]


@pytest.mark.parametrize("problem", CASES, ids=str)
def test_as_exact_as_attention(problem: Problem) -> None:
    assert_as_exact_as_attention(problem)


# all heads of the measured shapes: what goes wrong once in a thousand tiles shows here
LARGE = [
    wide(4, 16, 4096, 128),
    wide(8, 32, 2048, 128, 8, projected=True),
    # few heads, most of whose blocks are worked on at a time
    wide(1, 3, 32768, 128, 1, dtype=FP16),
]


@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_many_heads_many_times(problem: Problem) -> None:
    """Every number is that of separate kernels to rounding; dK and dV are the same bits again."""
    g, saved, options = saved_by(problem)
    expected = by_separate_kernels(g, saved, options)
    for _ in range(10):
        got = run_backward("hopper", g, saved, options)
        for name, x, y in zip(("dq", "dk", "dv", "dc"), got, expected, strict=True):
            if name == "dq":
                assert (x.double() - y.double()).abs().max() <= 0.02 * y.abs().max()
                assert error(x, y) <= torch.finfo(problem.dtype).eps
            else:
                assert torch.equal(x, y), name


def test_the_same_bits_where_they_are_asked_for() -> None:
    g, saved, options = saved_by(wide(4, 16, 2048, 128))
    first, again = (by_separate_kernels(g, saved, options) for _ in range(2))
    for x, y in zip(first, again, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("together", [1, 3, 64])
def test_heads_by_turns(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order programs begin."""
    g, saved, options = saved_by(wide(2, 6, 1100, 128, 3, projected=True))
    expected = run_backward("hopper", g, saved, options)
    hopper._launches.cache_clear()
    monkeypatch.setattr(hopper, "HEADS_AT_A_TIME", {128: together})
    got = run_backward("hopper", g, saved, options)
    for name, x, y in zip(("dq", "dk", "dv", "dc"), got, expected, strict=True):
        assert error(x, y) <= 0.5 * torch.finfo(BF16).eps if name == "dq" else torch.equal(x, y)


def test_beside_nothing_but_its_own_memory() -> None:
    """Tokens in a sea of NaN, sums in memory that was full of NaN."""
    torch.cuda.empty_cache()
    torch.full((64 << 20,), float("nan"), device="cuda")
    g, saved, options = saved_by(wide(2, 4, 1100, 128))
    expected = by_separate_kernels(g, saved, options)
    inside = []
    for x in (g, *saved[:5]):
        sea = torch.full((2, 4, 1300, 128), float("nan"), device="cuda", dtype=BF16)
        inside.append(sea[:, :, :1100].copy_(x))
    got = run_backward("hopper", inside[0], Saved(*inside[1:], *saved[5:]), options)
    for x, y in zip(got, expected, strict=True):
        assert torch.isfinite(x).all()
        assert error(x, y) <= torch.finfo(BF16).eps


def test_captured() -> None:
    g, saved, options = saved_by(wide(2, 16, 1024, 128))
    expected = run_backward("hopper", g, saved, options)
    graph, found = captured(lambda: run_backward("hopper", g, saved, options))
    for _ in range(3):
        for x in found:
            x.zero_()
        graph.replay()
        for x, y in zip(found, expected, strict=True):
            assert error(x, y) <= 0.5 * torch.finfo(BF16).eps
