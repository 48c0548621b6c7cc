"""Kernels for Hopper GPUs: one causal sweep, and dQ, dK and dV of wide heads from one kernel.

Both are as exact as torch's attention, in any order of programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl

from gfsa.functional import graph_filter_attention
from gfsa.kernels import hopper, op, routes, sweep, two_pass
from gfsa.kernels.launching import Inputs, Launch, Options, Saved, problem_of
from gfsa.kernels.op import filter_attention, run_backward, run_forward
from support import packed_cases
from support.capturing import captured
from support.fused_cases import Problem, assert_as_exact_as_attention, assert_same_bits, error
from support.nothing_launched import fresh_launches
from support.packed_cases import Packed

BF16, FP16 = torch.bfloat16, torch.float16

if routes.capability(torch.device("cuda")) != (9, 0) or routes.TRITON != routes.MEASURED_TRITON:
    pytest.skip("needs a Hopper GPU and Triton 3.6", allow_module_level=True)


@pytest.fixture(autouse=True)
def _for_any_shape(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shapes that the kernel can serve, not the measured ones alone; launches are not kept."""
    wider = dict.fromkeys((64, 128), (257, 10**6))
    found = [x._replace(lengths=wider) if x.name == "sweep" else x for x in routes.ROUTES]
    monkeypatch.setattr(routes, "ROUTES", tuple(found))
    monkeypatch.setattr(routes, "SWEEP_TOKENS", 1)
    monkeypatch.setattr(hopper, "LEAST_WITH_QUERIES", 1)
    routes.kernels_of.cache_clear()
    with fresh_launches():
        yield
    routes.kernels_of.cache_clear()


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
    q, *_ = problem.tensors()
    assert op.kernels_for(q, None, Options(0.1, True)).forward == "sweep"
    assert_as_exact_as_attention(problem)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_u_is_added_as_it_is_saved(head_dim: int) -> None:
    """The gradient of wide heads tells c2·A·U from the output, V and the saved U.

    Without it the output is their sum to one rounding, 0.21 of bfloat16's epsilon in this norm;
    with U as it was before it was rounded, there would be two, 0.29.
    """
    q, k, v, *_ = causal(2, 4, 1024, head_dim).tensors()
    coeffs = torch.tensor([0.01, 1.0, 0.0], device="cuda").repeat(4, 1)
    out, u, _ = sweep.forward(Inputs(q, k, v, coeffs, None, None, Options(0.1, True)))
    # the coefficient as the kernel has it, in float32
    expected = coeffs[0, 0].double() * v.double() + u.double()
    assert error(out, expected) <= 0.25 * torch.finfo(BF16).eps


# all heads of the measured shapes: what goes wrong once in a thousand tiles shows here
LARGE = [
    causal(64, 8, 1024, 64),
    causal(16, 16, 2048, 64, projected=True),
    causal(4, 16, 4096, 128),
    causal(8, 32, 2048, 128, 8),
    # few heads, most of whose blocks are worked on at a time
    causal(1, 12, 8192, 64),
    causal(1, 3, 32768, 128, 1, projected=True),
]


@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_many_heads_many_times(problem: Problem) -> None:
    *inputs, _ = problem.tensors()
    check_many_times(inputs, None)


def check_many_times(inputs: list[Tensor], spans: Tensor | None) -> None:
    """Each run gives the same bits, and every number is that of two passes to rounding."""
    options = Options(inputs[0].shape[-1] ** -0.5, True)
    expected = two_pass.forward(Inputs(*inputs, spans, None, options))
    first = sweep.forward(Inputs(*inputs, spans, None, options))
    for x, y in zip(first, expected, strict=True):
        assert (x.double() - y.double()).abs().max() <= 0.02 * y.abs().max()
    for _ in range(10):
        again = sweep.forward(Inputs(*inputs, spans, None, options))
        for x, y in zip(again, first, strict=True):
            assert torch.equal(x, y)


# programs, and heads at a time; fewer programs than an H200 holds
FEW = [(1, 128), (2, 1), (7, 5)]
# more than it holds, five on each of 132 multiprocessors at the very most; 12 heads of 128 blocks
# are 1,536 items, so that some programs take one item and the others two, or all take one
MANY_PROGRAMS = [(1000, 128), (1000, 1), (1000, 2), (1536, 128), (1536, 1)]
LONG = 16_300


def swept_by(
    programs: int,
    span: int,
    inputs: tuple[Tensor, ...],
    spans: Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
    degree: int = 2,
) -> Tensor:
    """The filter by so many programs, ``span`` heads at a time."""
    monkeypatch.setattr(sweep, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(sweep, "heads_at_a_time", lambda problem, degree: span)
    grids: list[tuple[int, ...]] = []
    launch = Launch.__call__

    def note(self: Launch, *args: Any, **options: Any) -> None:
        grids.append(self.grid)
        launch(self, *args, **options)

    monkeypatch.setattr(Launch, "__call__", note)
    with fresh_launches():
        out, *_ = sweep.forward(Inputs(*inputs, spans, None, Options(0.1, True)), degree)
    # the plan of the spans is launched before; a grid is never larger than there are blocks
    assert grids[-1] == (programs, 1, 1)
    return out


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("programs", "span", "tokens"),
    [*((*few, 1100) for few in FEW), *((*many, LONG) for many in MANY_PROGRAMS)],
)
def test_no_deadlock(
    programs: int, span: int, tokens: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer programs than the GPU holds, and more; few heads, whose blocks wait for each other."""
    *inputs, _ = causal(2, 6, tokens, head_dim, 3).tensors()
    expected, *_ = sweep.forward(Inputs(*inputs, None, None, Options(0.1, True)))
    got = swept_by(programs, span, tuple(inputs), None, monkeypatch)
    assert torch.equal(got, expected)


def test_two_at_a_time() -> None:
    """Two launches on two streams keep their flags apart, and share the GPU."""
    q, k, v, coeffs, _ = causal(8, 12, 1024, 64).tensors()
    options = Options(0.1, True)
    expected, *_ = sweep.forward(Inputs(q, k, v, coeffs, None, None, options))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(sweep.forward(Inputs(q, k, v, coeffs, None, None, options))[0])
    torch.cuda.synchronize()
    for got in results:
        assert torch.equal(got, expected)


def test_captured_and_compiled() -> None:
    """By the same kernels as a call whose gradient may follow, so to the bit."""
    q, k, v, coeffs, _ = causal(2, 64, 1024, 64).tensors()
    eager = graph_filter_attention(q, k, v, coeffs, is_causal=True, backend="fused")
    options = Options(64**-0.5, True)
    graph, found = captured(lambda: filter_attention(q, k, v, coeffs, None, None, options))
    for _ in range(3):
        found.zero_()
        graph.replay()
        assert torch.equal(found, eager)
    compiled = torch.compile(graph_filter_attention, fullgraph=True)
    assert torch.equal(compiled(q, k, v, coeffs, is_causal=True, backend="fused"), eager)


def packed(*rows: list[int], **options: object) -> Packed:
    return Packed(rows, **{"head_dim": 64, "dtype": BF16, "device": "cuda", **options})  # type: ignore[arg-type]


def spans_of(packed: Packed) -> Tensor:
    return packed.visible().spans(packed.length, torch.device("cuda"))


MIXED = [700, 300, 1, 1047]
MANY = [1800, 64, 1, 2500, 77, 640, 1, 1, 1000, 128, 300, 1680]
PACKED = [
    packed(MIXED),
    packed(MIXED, dtype=FP16, window=256, projected=True),
    packed(MIXED, head_dim=128),
    packed(MIXED, head_dim=128, dtype=FP16, heads=4, key_heads=2, window=300),
    # shorter than a tile, a row for each sequence, and one as long as its row
    packed([64, 128, 256, 64], [500, 12], [512], heads=4, key_heads=1, projected=True),
    packed([1] * 100 + [63, 65, 127, 129, 16], head_dim=128),
    packed([1] * 100 + [63, 65, 127, 129, 16], [500], dtype=FP16),
    packed([513, 1, 487], window=100),
    packed([513, 1, 487], head_dim=128, window=64),
    packed([1024], window=1),
    packed([1024], window=16, dtype=FP16, head_dim=128),
    packed([600, 424], window=10**6, scale=0.5),
    packed(MANY, heads=3, key_heads=1),
    packed(MANY, head_dim=128),
]


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_documents_and_windows(case: Packed) -> None:
    q, *_ = case.tensors()
    assert op.kernels_for(q, spans_of(case), Options(0.1, True)).forward == "sweep"
    packed_cases.assert_as_exact_as_attention(case)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [[1024, 384, 128, 512], [1000, 300, 129, 619]], ids=str)
def test_documents_are_documents_alone(lengths: list[int], head_dim: int) -> None:
    """To the bit where they are as long as a block, and one of a whole row as a causal row."""
    case = packed(lengths, heads=4, head_dim=head_dim, key_heads=2)
    q, k, v, coeffs, _ = case.tensors()
    options = Options(0.1, True)
    together = sweep.forward(Inputs(q, k, v, coeffs, spans_of(case), None, options))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for start, length in zip(starts, lengths, strict=True):
        parts = [x.narrow(2, start, length).contiguous() for x in (q, k, v)]
        alone = sweep.forward(Inputs(*parts, coeffs, None, None, options))
        for x, y in zip(together, alone, strict=True):
            assert torch.equal(x.narrow(2, start, length), y)
    whole = packed([2048], heads=4, head_dim=head_dim, key_heads=2)
    one = sweep.forward(Inputs(q, k, v, coeffs, spans_of(whole), None, options))
    for x, y in zip(one, sweep.forward(Inputs(q, k, v, coeffs, None, None, options)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    "case",
    [
        packed(MANY, MANY[::-1], MANY[5:] + MANY[:5], MANY[3:] + MANY[:3], heads=16),
        packed(MANY, MANY[::-1], heads=16, head_dim=128, key_heads=4),
        packed(MANY, heads=12, window=500),
        packed(MANY, heads=12, window=200, head_dim=128),
    ],
    ids=str,
)
def test_many_documents_many_times(case: Packed) -> None:
    *inputs, _ = case.tensors()
    check_many_times(inputs, spans_of(case))


SHORT_ROWS = ([300, 1, 1, 698, 100], [50] * 22)
# documents whose blocks wait for many others, and such as wait for none
LONG_ROWS = ([9000, 1, 1, 698, 5000, 1600], [50] * 326)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("degree", "window"), [(1, 400), (2, 400), (2, None)])
@pytest.mark.parametrize(
    ("programs", "span", "rows"),
    [*((*few, SHORT_ROWS) for few in FEW), *((*many, LONG_ROWS) for many in MANY_PROGRAMS)],
)
def test_no_deadlock_with_documents(
    programs: int,
    span: int,
    rows: tuple[list[int], ...],
    window: int | None,
    degree: int,
    head_dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = packed(*rows, heads=6, key_heads=2, head_dim=head_dim, window=window, degree=degree)
    *inputs, _ = case.tensors()
    spans = spans_of(case)
    expected, *_ = sweep.forward(Inputs(*inputs, spans, None, Options(0.1, True)), degree)
    got = swept_by(programs, span, tuple(inputs), spans, monkeypatch, degree)
    assert torch.equal(got, expected)


@triton.jit
def _hold(released, held, PATIENCE: tl.constexpr):
    """Stay until ``released`` is not zero, or PATIENCE nanoseconds are over."""
    tl.atomic_add(held, 1)
    start = _now()
    while (tl.atomic_add(released, 0) == 0) & (_now() - start < PATIENCE):
        pass
    tl.atomic_add(held, -1)


@triton.jit
def _now():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@contextmanager
def hold_multiprocessors(count: int, patience: float = 5.0) -> Iterator[Tensor]:
    """Hold so many multiprocessors, each by one program of 1,024 threads; how many still run."""
    released, programs = torch.zeros(2, dtype=torch.int32, device="cuda").unbind()
    # what is run while the kernel holds on must be loaded by then: loading waits for all kernels
    released.fill_(0)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        _hold[(count,)](released, programs, int(patience * 1e9), num_warps=32)
    try:
        while int(programs) < count:
            pass
        yield programs
    finally:
        released.fill_(1)
        torch.cuda.synchronize()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_beside_a_kernel_that_holds_half_the_gpu(head_dim: int) -> None:
    """Programs that find no room yet are waited for by none that runs."""
    case = packed(MANY, MANY[::-1], heads=8, head_dim=head_dim)
    q, k, v, coeffs, _ = case.tensors()
    stream = torch.cuda.Stream()
    for spans in (spans_of(case), None):
        results = []

        def run_aside(spans: Tensor | None = spans, results: list[Tensor] = results) -> None:
            given = Inputs(q, k, v, coeffs, spans, None, Options(0.1, True))
            with torch.cuda.stream(stream):
                results.append(sweep.forward(given)[0].clone())
            stream.synchronize()

        torch.cuda.synchronize()
        # memory and code are there from then on: neither waits for the kernel that holds on
        run_aside()
        run_aside()
        half = sweep.multiprocessors(q.device.index) // 2
        with hold_multiprocessors(half) as held:
            run_aside()
            # none has lost its patience
            assert int(held) == half
        assert torch.equal(results[2], results[0])


def test_a_captured_sweep_sees_new_documents() -> None:
    first, second = packed(MIXED, heads=4), packed([100, 900, 1000, 48], heads=4, window=300)
    q, k, v, coeffs, _ = first.tensors()
    spans, options = spans_of(first).clone(), Options(0.1, True)
    graph, found = captured(lambda: filter_attention(q, k, v, coeffs, spans, None, options))
    for case in (first, second):
        spans.copy_(spans_of(case))
        graph.replay()
        expected = filter_attention(q, k, v, coeffs, spans, None, options)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [None, ([500, 1, 599], [1100])])
def test_beside_nothing_but_its_own_memory(rows: tuple[list[int], ...] | None) -> None:
    """Tokens in a sea of NaN: keys and queries beyond the last one are not looked at."""
    for head_dim in (64, 128):
        sea = torch.full((4, 2, 4, 1200, head_dim), float("nan"), device="cuda", dtype=BF16)
        q, k, v = (x[:, :, :1100].copy_(torch.randn_like(x[:, :, :1100])) for x in sea[:3])
        coeffs = torch.rand(4, 3, device="cuda")
        spans = None if rows is None else spans_of(packed(*rows))
        got, *_ = sweep.forward(Inputs(q, k, v, coeffs, spans, None, Options(0.1, True)))
        clean = [x.contiguous() for x in (q, k, v)]
        expected, *_ = sweep.forward(Inputs(*clean, coeffs, spans, None, Options(0.1, True)))
        assert torch.isfinite(got).all()
        assert torch.equal(got, expected)


def saved_by(problem: Problem) -> tuple[Tensor, Saved, Options]:
    """The output's gradient and what the forward pass saves."""
    q, k, v, coeffs, g = problem.tensors()
    options = Options(problem.head_dim**-0.5, problem.is_causal)
    assert op.kernels_for(q, None, options).gradient == "hopper"
    assert hopper.adds_up_queries(problem_of(q, k, None, options), False)
    out, u, lse = run_forward("two_pass", q, k, v, coeffs, None, None, options)
    return g, Saved(q, k, v, u, out, lse, coeffs), options


def by_separate_kernels(g: Tensor, saved: Saved, options: Options) -> tuple[Tensor, ...]:
    torch.use_deterministic_algorithms(True)
    try:
        return run_backward("hopper", g, saved, options)
    finally:
        torch.use_deterministic_algorithms(False)


WIDE = [
    causal(2, 4, 1024, 128),
    causal(2, 4, 1024, 128, 2, dtype=FP16, projected=True),
    causal(1, 6, 1100, 128, 1, dtype=FP16),
    causal(3, 3, 300, 128, projected=True, scale=-0.2),
    causal(3, 2, 324, 128, scale=0.3),
    causal(2, 3, 64, 128),
    causal(2, 3, 132, 128, dtype=FP16),
    causal(1, 2, 4100, 128),
]


@pytest.mark.parametrize("problem", WIDE, ids=str)
def test_gradients_of_wide_heads_are_as_exact_as_attention(problem: Problem) -> None:
    assert_as_exact_as_attention(problem)


# all heads of the measured shapes: what goes wrong once in a thousand tiles shows here
LARGE_WIDE = [
    causal(4, 16, 4096, 128),
    causal(8, 32, 2048, 128, 8, projected=True),
    Problem(2, 16, 8192, 128, dtype=BF16, device="cuda"),
    # few heads, most of whose blocks are worked on at a time
    causal(1, 3, 32768, 128, 1, dtype=FP16),
]


@pytest.mark.parametrize("problem", LARGE_WIDE, ids=str)
def test_gradients_of_many_wide_heads_many_times(problem: Problem) -> None:
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


def test_gradients_have_the_same_bits_where_they_are_asked_for() -> None:
    g, saved, options = saved_by(causal(4, 16, 2048, 128))
    first, again = (by_separate_kernels(g, saved, options) for _ in range(2))
    assert_same_bits(first, again)


@pytest.mark.parametrize("together", [1, 3, 64])
def test_heads_by_turns(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order programs begin."""
    g, saved, options = saved_by(causal(2, 6, 1100, 128, 3, projected=True))
    expected = run_backward("hopper", g, saved, options)
    monkeypatch.setattr(hopper, "HEADS_AT_A_TIME", {128: together})
    with fresh_launches():
        got = run_backward("hopper", g, saved, options)
    for name, x, y in zip(("dq", "dk", "dv", "dc"), got, expected, strict=True):
        assert error(x, y) <= 0.5 * torch.finfo(BF16).eps if name == "dq" else torch.equal(x, y)


def test_gradients_beside_nothing_but_their_own_memory() -> None:
    """Tokens in a sea of NaN, sums in memory that was full of NaN."""
    torch.cuda.empty_cache()
    torch.full((64 << 20,), float("nan"), device="cuda")
    g, saved, options = saved_by(causal(2, 4, 1100, 128))
    expected = by_separate_kernels(g, saved, options)
    inside = []
    for x in (g, *saved[:5]):
        sea = torch.full((2, 4, 1300, 128), float("nan"), device="cuda", dtype=BF16)
        inside.append(sea[:, :, :1100].copy_(x))
    got = run_backward("hopper", inside[0], Saved(*inside[1:], *saved[5:]), options)
    for x, y in zip(got, expected, strict=True):
        assert torch.isfinite(x).all()
        assert error(x, y) <= torch.finfo(BF16).eps


def test_captured_gradients() -> None:
    g, saved, options = saved_by(causal(2, 16, 1024, 128))
    expected = run_backward("hopper", g, saved, options)
    graph, found = captured(lambda: run_backward("hopper", g, saved, options))
    for _ in range(3):
        for x in found:
            x.zero_()
        graph.replay()
        for x, y in zip(found, expected, strict=True):
            assert error(x, y) <= 0.5 * torch.finfo(BF16).eps
