"""One causal sweep on a GPU: as exact as torch's attention, in any order of programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from gfsa.functional import graph_filter_attention
from gfsa.operators.fused import dispatch, eligibility
from gfsa.operators.fused.autograd import filter_attention
from gfsa.operators.fused.long import launch as long
from gfsa.operators.fused.problem import Options
from gfsa.operators.fused.sweep import launch as sweep
from support.fused_cases import NAMES, Problem, attention_errors, error, run

BF16, FP16 = torch.bfloat16, torch.float16

if eligibility.refusal_by_sweep(torch.empty(1, 64, 1024, 64, device="cuda"), None, 0.1, True, 0.0):
    pytest.skip("needs a Hopper GPU and Triton 3.6", allow_module_level=True)


@pytest.fixture(autouse=True)
def _for_any_shape(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shapes that the kernel can serve, not the measured ones alone; launches are not kept."""
    monkeypatch.setattr(eligibility, "SWEEP_LENGTHS", (257, 10**6))
    monkeypatch.setattr(eligibility, "SWEEP_HEADS", 1)
    sweep._launch.cache_clear()
    yield
    sweep._launch.cache_clear()


def causal(*shape: int, **options: object) -> Problem:
    return Problem(*shape, **{"dtype": BF16, "is_causal": True, "device": "cuda", **options})  # type: ignore[arg-type]


CASES = [
    causal(2, 4, 1024, 64),
    causal(2, 4, 1024, 64, projected=True, dtype=FP16),
    causal(2, 4, 1000, 64, 2, projected=True),
    causal(3, 2, 257, 64, scale=0.5),
    causal(1, 6, 1500, 64, 1, dtype=FP16),
    causal(2, 4, 1024, 128),
    causal(2, 4, 1024, 128, 2, dtype=FP16, projected=True),
    causal(1, 2, 2048, 128, 1, projected=True),
    causal(3, 2, 321, 128, scale=0.3),
    causal(1, 2, 4100, 128),
]


@pytest.mark.parametrize("problem", CASES, ids=str)
def test_as_exact_as_attention(problem: Problem) -> None:
    torch.manual_seed(1)
    q, *_ = problem.tensors()
    assert dispatch.forward_path(q, None, Options(0.1, True)) is sweep
    got, expected = run(problem)
    plain = attention_errors(problem)
    floor = 0.2 * torch.finfo(problem.dtype).eps
    allowed = dict(zip(NAMES, [2 * e + floor for e in plain], strict=False), dc=5e-3)
    for name, x, y in zip(NAMES, got, expected, strict=True):
        assert torch.isfinite(x).all(), name
        assert error(x, y) <= allowed[name], (name, error(x, y), allowed[name])


# all heads of the measured shapes: what goes wrong once in a thousand tiles shows here
LARGE = [
    causal(64, 8, 1024, 64),
    causal(16, 16, 2048, 64, projected=True),
    causal(4, 16, 4096, 128),
    causal(8, 32, 2048, 128, 8),
]


@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_many_heads_many_times(problem: Problem) -> None:
    """Each run gives the same bits, and every number is that of two passes to rounding."""
    q, k, v, coeffs, _ = problem.tensors()
    options = Options(problem.head_dim**-0.5, True)
    expected = long.forward(q, k, v, coeffs, None, None, options)
    first = sweep.forward(q, k, v, coeffs, None, None, options)
    for x, y in zip(first, expected, strict=True):
        assert (x.double() - y.double()).abs().max() <= 0.02 * y.abs().max()
    for _ in range(10):
        again = sweep.forward(q, k, v, coeffs, None, None, options)
        for x, y in zip(again, first, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("programs", "span"), [(1, 128), (2, 1), (7, 5), (1000, 128), (1000, 1), (1000, 2)]
)
def test_no_deadlock(
    programs: int, span: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer programs than the GPU holds, and more; few heads, whose blocks wait for each other."""
    q, k, v, coeffs, _ = causal(2, 6, 1100, head_dim, 3).tensors()
    options = Options(0.1, True)
    expected, *_ = sweep.forward(q, k, v, coeffs, None, None, options)
    sweep._launch.cache_clear()
    monkeypatch.setattr(sweep, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(sweep, "SPAN", span)
    got, *_ = sweep.forward(q, k, v, coeffs, None, None, options)
    assert torch.equal(got, expected)


def test_two_at_a_time() -> None:
    """Two launches on two streams keep their flags apart, and share the GPU."""
    q, k, v, coeffs, _ = causal(8, 12, 1024, 64).tensors()
    options = Options(0.1, True)
    expected, *_ = sweep.forward(q, k, v, coeffs, None, None, options)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(sweep.forward(q, k, v, coeffs, None, None, options)[0])
    torch.cuda.synchronize()
    for got in results:
        assert torch.equal(got, expected)


def test_beside_nothing_but_its_own_memory() -> None:
    """Tokens in a sea of NaN: keys and queries beyond the last one are not looked at."""
    for head_dim in (64, 128):
        sea = torch.full((4, 2, 4, 1200, head_dim), float("nan"), device="cuda", dtype=BF16)
        q, k, v = (x[:, :, :1100].copy_(torch.randn_like(x[:, :, :1100])) for x in sea[:3])
        coeffs = torch.rand(4, 3, device="cuda")
        got, *_ = sweep.forward(q, k, v, coeffs, None, None, Options(0.1, True))
        clean = [x.contiguous() for x in (q, k, v)]
        expected, *_ = sweep.forward(*clean, coeffs, None, None, Options(0.1, True))
        assert torch.isfinite(got).all()
        assert torch.equal(got, expected)


def test_captured_and_compiled() -> None:
    q, k, v, coeffs, _ = causal(2, 32, 1024, 64).tensors()
    eager = graph_filter_attention(q, k, v, coeffs, is_causal=True, backend="fused")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = filter_attention(q, k, v, coeffs, None, None, Options(64**-0.5, True))
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, eager)
    compiled = torch.compile(graph_filter_attention, fullgraph=True)
    assert torch.equal(compiled(q, k, v, coeffs, is_causal=True, backend="fused"), eager)
