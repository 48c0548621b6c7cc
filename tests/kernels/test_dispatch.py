"""Which kernels run a call, decided as on a Hopper GPU; no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gfsa.kernels import autograd, degree_one_attention, eligibility, operator
from gfsa.kernels.dispatch import backward_path, forward_path
from gfsa.kernels.hopper import backward_path as hopper_backward
from gfsa.kernels.long import launch as long
from gfsa.kernels.operator import FusedOperator
from gfsa.kernels.problem import NO_MASK, SPANS, Options, problem_of
from gfsa.kernels.short import launch as short
from gfsa.kernels.sweep import launch as sweep
from gfsa.operators import AttentionCall, Visibility


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligibility, "_refusal_of_device_by_gluon", lambda q: None)
    monkeypatch.setattr(long, "cudnn_would_run", lambda q, k, v, mask, options: mask is None)


@pytest.mark.parametrize(
    ("length", "head_dim", "masked", "scale", "forward", "backward"),
    [
        (100, 64, False, 0.1, short, short),
        (100, 64, True, 0.1, short, short),
        (100, 64, False, -0.1, long, hopper_backward),
        (100, 128, False, 0.1, long, hopper_backward),
        (300, 64, False, 0.1, long, hopper_backward),
        (300, 64, True, 0.1, long, hopper_backward),
        (301, 64, False, 0.1, long, long),
        (2048, 128, False, 0.1, long, hopper_backward),
        (2050, 128, False, 0.1, long, long),
        (2048, 128, True, 0.1, long, hopper_backward),
        (2050, 128, True, 0.1, long, long),
    ],
)
def test_paths(
    length: int, head_dim: int, masked: bool, scale: float, forward: object, backward: object
) -> None:
    q = torch.empty(1, 1, length, head_dim, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 1, length, dtype=torch.bool) if masked else None
    options = Options(scale, is_causal=True)
    assert forward_path(q, mask, options) is forward
    assert backward_path(q, q, q, mask, options) is backward


@pytest.mark.parametrize(
    ("shape", "options", "forward"),
    [
        ((8, 12, 1024, 64), Options(0.1, True), sweep),
        ((4, 16, 4096, 128), Options(0.1, True), sweep),
        ((8, 12, 1024, 64), Options(0.1), long),
        ((8, 12, 1024, 64), Options(-0.1, True), long),
        ((8, 12, 1024, 64), Options(0.1, True, 0.1), long),
        ((8, 12, 1024, 80), Options(0.1, True), long),
        ((8, 12, 1000, 64), Options(0.1, True), long),
        ((8, 12, 100, 64), Options(0.1, True), short),
        ((1, 95, 1024, 64), Options(0.1, True), long),
        ((1, 3, 32768, 128), Options(0.1, True), sweep),
        ((1, 3, 32769, 128), Options(0.1, True), long),
        ((1, 70000, 1024, 64), Options(0.1, True), long),
    ],
    ids=str,
)
def test_one_causal_sweep(shape: tuple[int, ...], options: Options, forward: object) -> None:
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    assert forward_path(q, None, options) is forward
    if forward is sweep:
        assert backward_path(q, q, q, None, options) is hopper_backward
    mask = torch.ones(shape[0], 1, 1, shape[2], dtype=torch.bool)
    assert forward_path(q, mask, options) is (short if forward is short else long)


@pytest.mark.parametrize(
    ("shape", "options", "forward"),
    [
        ((4, 16, 8192, 64), Options(0.1, True), sweep),
        ((4, 16, 4096, 128), Options(0.1, True), sweep),
        ((8, 12, 1024, 64), Options(-0.1, True), long),
        ((8, 12, 1024, 64), Options(0.1, True, 0.1), long),
        ((8, 12, 1024, 80), Options(0.1, True), long),
        ((8, 12, 1000, 64), Options(0.1, True), long),
        ((1, 95, 1024, 64), Options(0.1, True), long),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, None], ids=["one row of spans", "a row for each sequence"])
def test_one_sweep_over_packed_documents(
    shape: tuple[int, ...], options: Options, forward: object, rows: int | None
) -> None:
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    spans = torch.empty(rows or shape[0], 2, shape[2], dtype=torch.int32, device="meta")
    assert forward_path(q, spans, options) is forward
    if forward is sweep:
        assert backward_path(q, q, q, spans, options) is hopper_backward
        assert forward_path(q.half(), spans, options) is sweep


@pytest.mark.parametrize(
    ("batch", "heads", "grid"),
    [(4, 16, (32, 8, 2)), (1, 12, (12, 8, 1)), (3, 15, (15, 8, 3)), (1, 37, (1, 8, 37))],
)
def test_gradients_go_block_by_block(batch: int, heads: int, grid: tuple[int, int, int]) -> None:
    """A block of as many heads as can be worked on together, then the next block."""
    q = torch.empty(batch, heads, 512, 64, dtype=torch.bfloat16, device="meta")
    problem = problem_of(q, q, None, Options(0.1, True))
    assert hopper_backward.grid_of(problem, 64, 64) == grid
    together = {64: 8, 12: 6, 45: 5, 37: 1}[batch * heads]
    expected = (together, 8, batch * heads // together)
    assert hopper_backward.grid_of(problem, 64, 128) == expected


@pytest.mark.parametrize(
    ("length", "wide", "narrow"),
    [(2048, 8, 16), (8192, 8, 16), (8196, 4, 16), (16384, 4, 16), (32768, 2, 16), (131072, 1, 16)],
)
def test_long_sequences_of_wide_heads_go_few_at_a_time(length: int, wide: int, narrow: int) -> None:
    """What is worked on together stays in the cache."""
    q = torch.empty(1, 16, length, 64, dtype=torch.bfloat16, device="meta")
    problem = problem_of(q, q, None, Options(0.1, True))
    assert hopper_backward.grid_of(problem, 64, 128)[::2] == (wide, 16 // wide)
    assert hopper_backward.grid_of(problem, 64, 64)[::2] == (narrow, 16 // narrow)
    spans = torch.empty(1, 2, length, dtype=torch.int32, device="meta")
    packed = problem_of(q, q, spans, Options(0.1, True))
    assert hopper_backward.grid_of(packed, 64, 64)[::2] == (2, 8)
    assert hopper_backward.grid_of(packed, 64, 128)[::2] == (wide, 16 // wide)


@pytest.mark.parametrize(
    ("length", "heads", "packed"),
    [(1024, 128, 128), (2048, 64, 128), (4096, 32, 128), (16384, 8, 32), (32768, 4, 16)],
)
def test_the_sweep_goes_over_as_many_tokens_as_stay_in_the_cache(
    length: int, heads: int, packed: int
) -> None:
    assert sweep.heads_at_a_time(length, NO_MASK) == heads
    assert sweep.heads_at_a_time(length, SPANS) == packed


@pytest.mark.parametrize(
    ("shape", "options", "masked", "expected"),
    [
        ((4, 16, 4096, 128), Options(0.1, True), False, True),
        ((8, 32, 2048, 128), Options(0.1, True), False, True),
        ((8, 32, 2044, 128), Options(0.1, True), False, False),
        ((4, 16, 4096, 128), Options(0.1), False, False),
        ((4, 16, 4100, 128), Options(0.1, True), False, True),
        ((4, 16, 4100, 128), Options(0.1), False, False),
        ((4, 16, 4096, 128), Options(0.1), True, False),
        ((4, 16, 4096, 104), Options(0.1, True), False, False),
        ((4, 16, 4096, 128), Options(0.1, True), True, False),
        ((4, 16, 4096, 96), Options(0.1, True), False, False),
        ((4, 16, 4096, 64), Options(0.1, True), False, False),
    ],
    ids=str,
)
def test_dq_is_added_up_in_any_order_unless_bits_have_to_be_equal(
    shape: tuple[int, ...], options: Options, masked: bool, expected: bool
) -> None:
    """Long causal sequences of wide heads, without another mask."""
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    mask = torch.ones(shape[0], 1, 1, shape[2], dtype=torch.bool) if masked else None
    problem = problem_of(q, q, mask, options)
    assert hopper_backward.adds_up_queries(problem) is expected
    torch.use_deterministic_algorithms(True)
    try:
        assert not hopper_backward.adds_up_queries(problem)
    finally:
        torch.use_deterministic_algorithms(False)


def test_dropout_and_masks_over_queries_go_to_the_long_kernels() -> None:
    q = torch.empty(1, 1, 300, 64, dtype=torch.bfloat16)
    assert backward_path(q, q, q, None, Options(0.1, dropout_p=0.1)) is long
    mask = torch.ones(300, 300, dtype=torch.bool)
    assert backward_path(q, q, q, mask, Options(0.1)) is long


@pytest.mark.parametrize(
    ("length", "head_dim", "backward"), [(100, 64, hopper_backward), (2050, 128, long)]
)
def test_packed_documents_go_to_kernels_of_any_length(
    length: int, head_dim: int, backward: object
) -> None:
    q = torch.empty(1, 1, length, head_dim, dtype=torch.bfloat16)
    spans = Visibility.packed(torch.tensor([0, 40]), length).spans(length, q.device)
    assert forward_path(q, spans, Options(0.1, True)) is long
    assert backward_path(q, q, q, spans, Options(0.1, True)) is backward


def taken_by_degree_one(call: AttentionCall, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The function that computes a filter of degree 1, and how many coefficients it gets."""
    taken = []

    def taking(name: str, at: int) -> Any:
        def take(*given: torch.Tensor) -> Any:
            taken.append((name, given[at].shape[1]))
            return given[0]

        return take

    for name, at in (("filter_once", 3), ("filter_attention", 3), ("combine_degree_one", 2)):
        monkeypatch.setattr(operator, name, taking(name, at))
    FusedOperator(call).polynomial(torch.ones(2, 2), call.q)
    return taken


@pytest.mark.parametrize(
    ("head_dim", "options", "kernels"),
    [
        (64, {}, "filter_once"),
        (128, {}, "filter_once"),
        (80, {}, "filter_attention"),
        (64, {"dropout_p": 0.1}, "filter_attention"),
        (64, {"scale": -0.3}, "filter_attention"),
    ],
)
def test_packed_documents_of_degree_one(
    head_dim: int, options: dict[str, Any], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass where it serves, else the kernels of degree 2; never torch's attention."""
    q = torch.zeros(1, 2, 300, head_dim, dtype=torch.bfloat16)
    call = AttentionCall(q, q, visible=Visibility.packed(torch.tensor([0, 40]), 300), **options)
    powers = 2 if kernels == "filter_once" else 3
    assert taken_by_degree_one(call, monkeypatch) == [(kernels, powers)]


@pytest.mark.parametrize(
    ("head_dim", "options", "capability", "kernels"),
    [
        (128, {"is_causal": True}, (9, 0), "filter_attention"),
        (64, {"is_causal": True}, (8, 6), "filter_attention"),
        # their gradient does not fit on the chip
        (128, {"is_causal": True}, (8, 6), "combine_degree_one"),
        # torch's attention takes padding alone as it is
        (128, {}, (9, 0), "combine_degree_one"),
        (64, {"is_causal": True, "dropout_p": 0.1}, (9, 0), "combine_degree_one"),
    ],
)
def test_padded_rows_of_degree_one(
    head_dim: int,
    options: dict[str, Any],
    capability: tuple[int, int],
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels of degree 2 where torch would write a mask of all queries and keys."""
    monkeypatch.setattr(eligibility, "capability", lambda device: capability)
    q = torch.zeros(2, 2, 300, head_dim, dtype=torch.bfloat16)
    mask = torch.ones(2, 1, 1, 300, dtype=torch.bool)
    call = AttentionCall(q, q, mask, **options)
    powers = 3 if kernels == "filter_attention" else 2
    assert taken_by_degree_one(call, monkeypatch) == [(kernels, powers)]


def test_each_stride_of_64_bits_has_code_of_its_own() -> None:
    """Code whose first stride has 64 bits, the second 32, would cut a second one of 64."""
    q = torch.empty(2, 2, 16, 16, dtype=torch.bfloat16)
    memory = torch.empty(2**33, dtype=torch.bool, device="meta")
    far = 2**31
    variants = {
        problem_of(q, q, memory.as_strided((2, 2, 16, 16), strides), Options(0.1)).variant
        for strides in [(9, 9, 9, 1), (far, 9, 9, 1), (9, far, 9, 1), (far, far, 9, 1)]
    }
    assert len(variants) == 4


@pytest.mark.parametrize(
    ("shape", "forward"),
    [((8, 12, 1024, 64), sweep), ((4, 16, 4096, 128), sweep), ((1, 2, 300, 64), long)],
)
def test_a_call_with_gradients_takes_the_same_forward(
    shape: tuple[int, ...], forward: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever kernels serve its gradient."""
    taken = []

    def run_forward(path: object, q: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
        taken.append(path)
        return torch.empty_like(q), torch.empty_like(q), q.new_empty(shape[:3])

    monkeypatch.setattr(autograd, "run_forward", run_forward)
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    coeffs = torch.empty(shape[1], 3, device="meta")
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            y = autograd.filter_attention(q, q, q, coeffs, None, None, Options(0.1, True))
        assert y.requires_grad == gradients
    assert taken == [forward, forward]


def test_integers_are_no_other_kernels() -> None:
    """Triton compiles the int 1 in, and the code would serve every other scale after it."""
    q = torch.empty(1, 1, 16, 16, dtype=torch.bfloat16)
    options = FusedOperator(AttentionCall(q, q, dropout_p=0, scale=1)).options
    assert options == Options(1.0, False, 0.0)
    assert type(options.scale) is float
    assert type(options.dropout_p) is float


def test_nothing_is_kept_for_a_gradient_that_will_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuDNN's gradient of degree 1 needs A·V; generation and evaluation do not."""
    kept: list[bool] = []

    def run(q: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
        kept.append(others[-1])
        return q.clone(), q.new_empty(0), q.new_empty(0)

    monkeypatch.setattr(eligibility, "leaves_gradient_to_cudnn", lambda q, mask: True)
    monkeypatch.setattr(degree_one_attention, "_run", run)
    q = torch.zeros(1, 2, 8, 16, requires_grad=True)
    given = (q, q, q, torch.ones(2, 2), None, Options(0.1, True))
    degree_one_attention.filter_once(*given)
    with torch.no_grad():
        degree_one_attention.filter_once(*given)
    assert kept == [True, False]
