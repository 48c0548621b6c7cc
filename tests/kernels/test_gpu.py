"""The fused kernels on a GPU, under FlashAttention's rule, over all that they promise to take."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

import gfsa
from gfsa.functional import graph_filter_attention
from gfsa.kernels import op, routes
from gfsa.kernels.launching import Options, Saved
from gfsa.kernels.op import filter_attention, kernels_for, run_backward, run_forward
from gfsa.kernels.routes import Backend
from gfsa.operators import AttentionOperator, DenseOperator
from support.capturing import captured
from support.far_strides import spread
from support.fused_cases import (
    NAMES,
    Problem,
    assert_as_exact_as_attention,
    assert_same_bits,
    attention_errors,
    error,
    outcome,
    run,
)
from support.route_cases import CASES, HOPPER_CASES, Case, check

BF16, FP16 = torch.bfloat16, torch.float16


def on_gpu(*shape: int, **options: Any) -> Problem:
    return Problem(*shape, **{"dtype": BF16, "device": "cuda", **options})


def fuzzed(count: int) -> list[Problem]:
    """Shapes and options drawn with a fixed seed, short and long ones alike."""
    draw = random.Random(6)
    problems = []
    for _ in range(count):
        long = draw.random() < 0.5
        heads = draw.choice([1, 2, 3, 4, 6])
        problems.append(
            Problem(
                batch=draw.choice([1, 2, 3]),
                heads=heads,
                length=draw.randint(257, 1100) if long else draw.randint(16, 256),
                head_dim=draw.choice([16, 32, 40, 64, 64, 80, 96, 128]),
                key_heads=draw.choice([h for h in range(1, heads + 1) if heads % h == 0]),
                is_causal=draw.random() < 0.4,
                mask=draw.choice(["none", "none", "keys", "full", "per head"]),
                dropout_p=draw.choice([0.0, 0.0, 0.0, 0.3]),
                projected=draw.random() < 0.5,
                scale=draw.choice([None, None, 0.3, -0.2]),
                dtype=draw.choice([BF16, BF16, FP16]),
                device="cuda",
            )
        )
    return problems


KNOWN = [
    on_gpu(2, 4, 64, 64),
    on_gpu(2, 4, 128, 64, projected=True),
    on_gpu(2, 4, 197, 64, projected=True),
    on_gpu(2, 4, 197, 64, dtype=FP16, is_causal=True),
    on_gpu(2, 4, 256, 64),
    on_gpu(3, 4, 128, 64, mask="keys"),
    on_gpu(3, 4, 100, 64, mask="keys", dropout_p=0.1),
    on_gpu(3, 4, 197, 64, mask="keys", is_causal=True),
    on_gpu(3, 4, 250, 64, dropout_p=0.1),
    on_gpu(2, 4, 128, 64, 2, is_causal=True, projected=True),
    on_gpu(3, 4, 60, 64, mask="full"),
    on_gpu(3, 4, 128, 64, mask="full", projected=True),
    on_gpu(3, 4, 128, 64, 2, mask="full", is_causal=True),
    on_gpu(2, 4, 200, 64, mask="full", dropout_p=0.1),
    on_gpu(2, 4, 256, 64, dtype=FP16, mask="full"),
    on_gpu(2, 4, 128, 64, mask="per head"),
    on_gpu(1, 2, 17, 8),
    on_gpu(1, 2, 2500, 128, projected=True),
    on_gpu(2, 2, 2048, 128, is_causal=True),
    on_gpu(2, 4, 1030, 256, 2, is_causal=True, projected=True),
    on_gpu(3, 2, 300, 200, mask="keys", dropout_p=0.1),
]


@pytest.mark.parametrize("problem", KNOWN + fuzzed(60), ids=str)
def test_as_exact_as_attention(problem: Problem) -> None:
    # a gradient that vanishes but for rounding (of q, when n = 1) has no relative error
    assert_as_exact_as_attention(problem, vanishing=1e-4)


@pytest.fixture
def _without_hopper_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient by what serves other GPUs, and calls that the Hopper kernels refuse."""
    monkeypatch.setattr(routes, "_filter_gradient", lambda situation: "two_pass")
    routes.kernels_of.cache_clear()


HOPPER = [
    on_gpu(2, 4, 300, 64),
    on_gpu(3, 4, 1024, 64, dtype=FP16, is_causal=True, projected=True),
    on_gpu(2, 6, 1100, 48, 2, is_causal=True, scale=-0.2),
    on_gpu(2, 4, 260, 8, scale=0.3),
    on_gpu(2, 4, 200, 96, dtype=FP16, projected=True),
    on_gpu(2, 8, 1500, 80, 4),
    on_gpu(1, 4, 1996, 128, 1, dtype=FP16, is_causal=True, projected=True),
    on_gpu(2, 2, 1920, 128),
    on_gpu(12, 16, 1024, 64, is_causal=True),
    on_gpu(3, 4, 512, 64, mask="keys"),
    on_gpu(3, 4, 1000, 64, 2, dtype=FP16, mask="keys", is_causal=True),
    on_gpu(2, 2, 644, 72, mask="keys", projected=True),
    on_gpu(2, 3, 1500, 80, mask="keys", is_causal=True),
    on_gpu(3, 4, 1000, 128, 2, mask="keys", is_causal=True),
    on_gpu(2, 4, 2048, 128, 1, dtype=FP16, mask="keys", is_causal=True),
    on_gpu(2, 4, 1024, 128, mask="keys", projected=True),
]


@pytest.mark.skipif(
    torch.cuda.get_device_capability() != (9, 0) or routes.TRITON != routes.MEASURED_TRITON,
    reason="written for Hopper GPUs, in the Gluon of certain versions of Triton",
)
@pytest.mark.parametrize("problem", HOPPER, ids=str)
def test_gradient_by_hopper_kernels(problem: Problem) -> None:
    """As exact as attention, the same bits again, and what the long kernels compute."""
    q, k, v, coeffs, g = problem.tensors()
    mask = problem.bool_mask()
    options = Options(problem.head_dim**-0.5, problem.is_causal)
    assert kernels_for(q, mask, options).gradient == "hopper"
    test_as_exact_as_attention(problem)
    out, u, lse = run_forward("two_pass", q, k, v, coeffs, mask, None, options)
    saved = Saved(q, k, v, u, out, lse, coeffs, mask)
    first, again, other = (
        run_backward(path, g, saved, options) for path in ("hopper", "hopper", "two_pass")
    )
    for name, x, y, z in zip(("dq", "dk", "dv", "dc"), first, again, other, strict=True):
        assert torch.equal(x, y), name
        if name == "dc":
            x, z = x.sum(2), z.sum(2)
        assert error(x, z.double()) <= torch.finfo(problem.dtype).eps, name


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mask_whose_keys_lie_far_apart(is_causal: bool) -> None:
    """The place of its last key does not fit into 32 bits."""
    *inputs, g = on_gpu(2, 4, 512, 64).tensors()
    inputs = [x.requires_grad_() for x in inputs]
    mask = torch.ones(2, 1, 1, 512, dtype=torch.bool, device="cuda")
    # the last keys too: they are the ones that are far away
    mask[0, ..., :100] = mask[1, ..., 450:] = False
    options = Options(0.125, is_causal)
    near, far = (
        outcome(lambda *x, keys=keys: filter_attention(*x, keys, None, options), inputs, g)
        for keys in (mask, spread(mask, -1))
    )
    assert_same_bits(near, far)


@pytest.mark.usefixtures("_without_hopper_kernels")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("c2", [0.0, 1e-6, -1e-4, 0.01])
def test_a_weak_second_pass_over_wide_heads(c2: float, dtype: torch.dtype) -> None:
    """The output tells what the second pass was, within its rounding."""
    *tokens, _, g = on_gpu(2, 2, 2048, 128, dtype=dtype, is_causal=True).tensors()
    coeffs = torch.tensor([[0.2, 0.9, c2], [0.0, 1.0, -c2]], device="cuda")
    results = []
    for backend, number in (("fused", dtype), ("dense", torch.float64)):
        inputs = [x.detach().to(number) for x in tokens]
        inputs += [coeffs.double() if backend == "dense" else coeffs.clone()]
        inputs = [x.requires_grad_() for x in inputs]
        options = {"is_causal": True, "backend": backend}
        work = partial(graph_filter_attention, **options)
        results.append(outcome(work, inputs, g.to(number)))
    for name, mine, exact in zip(NAMES, *results, strict=True):
        assert torch.isfinite(mine).all(), name
        assert error(mine, exact) <= torch.finfo(dtype).eps, name


def test_memory_of_wide_heads() -> None:
    """Beyond plain attention's peak: U and the logsumexps, and little on the way."""

    def peak(step: Callable[[], Tensor]) -> int:
        torch.autograd.grad(step(), inputs[:3], g)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(step(), inputs[:3], g)
        return torch.cuda.max_memory_allocated() - before

    q, k, v, _, g = (torch.randn(2, 16, 8192, 128, device="cuda", dtype=BF16) for _ in range(5))
    coeffs = torch.rand(16, 3, device="cuda")
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]
    plain = peak(lambda: torch.nn.functional.scaled_dot_product_attention(*inputs[:3]))
    ours = peak(lambda: graph_filter_attention(*inputs, backend="fused"))
    one = q.numel() * q.element_size()
    print(f"above plain attention: {(ours - plain) / 2**20:.1f} MiB, U takes {one / 2**20:.0f}")
    assert ours - plain <= 1.1 * one


ONCE = [
    on_gpu(2, 4, 128, 64, projected=True),
    on_gpu(2, 4, 197, 64, mask="keys"),
    on_gpu(2, 4, 1024, 64, is_causal=True, projected=True),
    on_gpu(3, 4, 513, 40, dtype=FP16, mask="keys", is_causal=True),
    on_gpu(2, 4, 1000, 64, scale=0.3),
    on_gpu(2, 4, 256, 32, dtype=FP16, is_causal=True, projected=True),
    on_gpu(2, 4, 300, 64, dtype=FP16, mask="full"),
    on_gpu(2, 4, 2048, 64, is_causal=True),
    on_gpu(2, 3, 2048, 128, dtype=FP16),
    on_gpu(2, 3, 513, 80, scale=-0.2),
    # the Hopper gradient: lengths that fill no tile, after each of the forward passes
    on_gpu(2, 3, 333, 64, dtype=FP16),
    on_gpu(2, 3, 1501, 64),
    on_gpu(2, 3, 1501, 64, dtype=FP16, is_causal=True, projected=True),
    # heads that share keys: short, one pass, in one sweep, around torch's attention
    on_gpu(2, 4, 100, 64, key_heads=2, is_causal=True),
    on_gpu(2, 8, 700, 64, key_heads=2, projected=True),
    on_gpu(2, 8, 2048, 64, key_heads=2, is_causal=True, projected=True),
    on_gpu(2, 8, 1500, 64, key_heads=2, dtype=FP16),
    on_gpu(2, 8, 300, 128, key_heads=2, is_causal=True),
    on_gpu(2, 6, 300, 80, key_heads=2, dtype=FP16, mask="keys", projected=True),
    on_gpu(2, 8, 1500, 128, key_heads=2, dtype=FP16),
    # wide heads in one sweep; the last two with cuDNN's gradient
    on_gpu(2, 3, 1024, 128, is_causal=True),
    on_gpu(2, 3, 1500, 128, dtype=FP16, is_causal=True, projected=True),
    on_gpu(2, 8, 2048, 128, key_heads=2, is_causal=True),
    on_gpu(
        2, 8, 1301, 128, key_heads=2, is_causal=True, projected=True,
        scale=0.2,
    ),
    on_gpu(1, 3, 4100, 128, dtype=FP16, is_causal=True, projected=True),
    on_gpu(1, 4, 5000, 128, key_heads=2, is_causal=True),
    # features that products leave out
    on_gpu(2, 8, 700, 96, key_heads=2, is_causal=True, projected=True),
    on_gpu(1, 3, 1301, 96, dtype=FP16, is_causal=True),
    on_gpu(2, 8, 700, 80, key_heads=2, projected=True),
    on_gpu(1, 3, 1301, 96),
]  # fmt: skip


def check_degree_one(
    problem: Problem, mask: Tensor | None, work: Callable[..., Tensor], share: bool, floor: float
) -> None:
    """At most twice the errors of torch's attention, and so many units of rounding."""
    torch.manual_seed(1)
    q, k, v, coeffs, g = problem.tensors()
    shares = [torch.rand(problem.heads, device="cuda")] if share else []
    if share:
        # a token without a direction of its own
        v[0, 0, 5] = 0.0
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs[:, :2].contiguous(), *shares)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    dense = DenseOperator.from_qk(*exact[:2], mask, problem.is_causal, problem.scale)
    expected = outcome(lambda q, k, v, c, *a: dense.polynomial(c, v, *a), exact, g.double())
    floor *= torch.finfo(problem.dtype).eps
    # of other sizes: torch 2.11 uses what cuDNN built for a gradient of these sizes again for one
    # in another layout
    like = replace(problem, length=problem.length + 8)
    allowed = [*(2 * each + floor for each in attention_errors(like)), 5e-3, 5e-3]
    got = outcome(work, inputs, g)
    for name, x, y, most in zip((*NAMES, "da"), got, expected, allowed, strict=False):
        assert torch.isfinite(x).all(), name
        assert error(x, y) <= most, (name, error(x, y), most)


@pytest.mark.parametrize("problem", ONCE, ids=str)
def test_degree_one_as_exact_as_attention(problem: Problem) -> None:
    mask = problem.bool_mask()
    options = {"is_causal": problem.is_causal, "scale": problem.scale, "backend": "fused"}
    options |= {"attn_mask": mask, "enable_gqa": problem.key_heads > 0}
    check_degree_one(problem, mask, partial(graph_filter_attention, **options), False, 0.2)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("problem", ONCE, ids=str)
def test_degree_one_without_a_gradient(problem: Problem, exclusive: bool) -> None:
    """Other kernels may run than with one."""
    q, k, v, coeffs, _ = problem.tensors()
    mask, share = problem.bool_mask(), torch.rand(problem.heads, device="cuda")
    given = {"exclusive": share} if exclusive else {}
    options = {"is_causal": problem.is_causal, "scale": problem.scale, "backend": "fused"}
    options |= {"attn_mask": mask, "enable_gqa": problem.key_heads > 0}
    with torch.no_grad():
        out = graph_filter_attention(q, k, v, coeffs[:, :2], **options, **given)
    dense = DenseOperator.from_qk(
        *(x.double() for x in (q, k)), mask, problem.is_causal, problem.scale
    )
    expected = dense.polynomial(
        coeffs[:, :2].double(), v.double(), *(x.double() for x in given.values())
    )
    assert error(out, expected) <= 2 * attention_errors(problem)[0] + 0.2 * torch.finfo(q.dtype).eps


def test_degree_one_keeps_nothing_without_a_gradient() -> None:
    """The same kernel, without A·V: the same bits, in less memory."""
    q, k, v, coeffs, _ = on_gpu(1, 4, 4000, 128, 2).tensors()
    numbers = coeffs[:, :2].contiguous().requires_grad_()
    options = Options(0.09, is_causal=True)
    kept = filter_attention(q, k, v, numbers, None, None, options, once=True)
    with torch.no_grad():
        alone = filter_attention(q, k, v, numbers, None, None, options, once=True)
    assert torch.equal(kept, alone)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("length", [129, 300, 1024])
def test_degree_one_in_a_sea_of_nan(length: int, exclusive: bool) -> None:
    """Rows beyond the last token are neither read nor written."""
    problem = on_gpu(2, 3, length, 64, is_causal=True)
    q, k, v, coeffs, g = problem.tensors()
    seas, inside = [], []
    for x in (q, k, v, g):
        sea = torch.full((2, 3, length + 64, 64), float("nan"), dtype=BF16, device="cuda")
        sea[:, :, :length] = x
        seas.append(sea)
        inside.append(sea[:, :, :length])
    results = []
    for q_, k_, v_, g_ in (inside, (q, k, v, g)):
        inputs = [x.detach().requires_grad_() for x in (q_, k_, v_, coeffs[:, :2])]
        options = Options(0.125, is_causal=True, exclusive=exclusive)
        share = coeffs[:, 2].contiguous() if exclusive else None
        out = filter_attention(*inputs, None, None, options, once=True, share=share)
        results.append([out, *torch.autograd.grad(out, inputs, g_)])
    for name, x, y in zip(NAMES, *results, strict=True):
        assert torch.isfinite(x).all(), name
        assert torch.equal(x, y), name
    assert all(sea[:, :, length:].isnan().all() for sea in seas)


EXCLUSIVE = [
    on_gpu(2, 4, 100, 64),
    on_gpu(2, 4, 64, 64, 2, projected=True),
    on_gpu(2, 4, 250, 64, 2, is_causal=True, projected=True),
    on_gpu(2, 4, 1000, 96, 2, is_causal=True, projected=True),
    on_gpu(2, 4, 1000, 80, 2, projected=True),
    on_gpu(2, 4, 300, 64, 2, dtype=FP16, projected=True),
    on_gpu(2, 4, 1000, 64, is_causal=True, projected=True),
    on_gpu(2, 6, 1024, 64, 2, dtype=FP16, is_causal=True),
    on_gpu(2, 4, 1025, 128, 1, is_causal=True),
    on_gpu(1, 4, 4500, 128, 2, is_causal=True, projected=True),
    on_gpu(2, 4, 300, 96, is_causal=True),
    on_gpu(2, 4, 300, 256, 2, is_causal=True, projected=True),
    on_gpu(3, 4, 300, 64, mask="keys"),
    on_gpu(2, 4, 300, 64, mask="full"),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("problem", EXCLUSIVE, ids=str)
def test_the_exclusive_term(problem: Problem, compiled: bool) -> None:
    mask = problem.bool_mask()
    options = {"is_causal": problem.is_causal, "enable_gqa": problem.key_heads > 0}

    def filtered(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor, share: Tensor) -> Tensor:
        return graph_filter_attention(q, k, v, coeffs, mask, exclusive=share, **options)

    if compiled and mask is None:
        # of other sizes than the eager call, as in check_degree_one
        problem = replace(problem, length=problem.length + 16)
    # one mask for all calls; the compiler counts how often it compiled this function, also before
    torch._dynamo.reset()
    work = torch.compile(filtered, fullgraph=True, dynamic=False) if compiled else filtered
    check_degree_one(problem, mask, work, True, 0.5)


def test_the_exclusive_term_gives_the_same_bits_again() -> None:
    *inputs, coeffs, g = on_gpu(4, 5, 1024, 64, is_causal=True).tensors()
    inputs = [x.requires_grad_() for x in (*inputs, coeffs[:, :2], coeffs[:, 2].contiguous())]
    options = Options(0.125, is_causal=True, exclusive=True)

    def step(*tokens: Tensor) -> Tensor:
        return filter_attention(*tokens[:4], None, None, options, once=True, share=tokens[4])

    assert_same_bits(*(outcome(step, inputs, g) for _ in range(3)))


@pytest.mark.parametrize("exclusive", [None, 0.7])
def test_degree_one_in_a_captured_graph(exclusive: float | None) -> None:
    *inputs, coeffs, g = on_gpu(2, 4, 512, 64).tensors()
    inputs = [x.requires_grad_() for x in (*inputs, coeffs[:, :2].contiguous())]
    options = {"is_causal": True, "backend": "fused", "exclusive": exclusive}

    def step() -> list[Tensor]:
        return outcome(partial(graph_filter_attention, **options), inputs, g)

    graph, found = captured(step)
    graph.replay()
    assert_same_bits(found, step())


@pytest.mark.parametrize("length", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_handful_of_tokens(length: int, is_causal: bool) -> None:
    """Too few for errors to average out: measured by the largest result instead."""
    torch.manual_seed(4)
    problem = on_gpu(2, 4, length, 64, is_causal=is_causal)
    got, expected = run(problem)
    size = max(x.norm().item() for x in expected[:4])
    for name, x, y in zip(NAMES, got, expected, strict=True):
        room = torch.finfo(BF16).eps * (y.norm().item() if name == "dc" else size)
        assert (x.double() - y).norm().item() <= room, name


@pytest.mark.parametrize("problem", KNOWN[:9] + fuzzed(8), ids=str)
def test_the_same_bits_again(problem: Problem) -> None:
    results = []
    for _ in range(3):
        torch.manual_seed(2)
        results.append(run(problem)[0])
    assert_same_bits(*results)


@pytest.mark.parametrize("length", [5, 63, 100, 129, 197, 255, 300, 511])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.2}], ids=str)
def test_memory_beyond_the_tensors_is_never_used(length: int, options: dict) -> None:
    """The memory around each tensor holds NaN, and so does newly allocated memory."""
    torch.manual_seed(3)
    batch, heads, dim = 2, 3, 64
    torch.cuda.empty_cache()
    torch.full((64 << 20,), float("nan"), device="cuda")
    shape = (4, batch, heads, length + 70, dim)
    surroundings = torch.full(shape, float("nan"), device="cuda", dtype=BF16)
    inside = surroundings[..., 33 : 33 + length, :]
    inside.copy_(torch.randn(inside.shape, device="cuda"))
    q, k, v, g = inside.unbind(0)
    coeffs = torch.randn(heads, 3, device="cuda")
    inputs = [x.detach().requires_grad_() for x in (q, k, v, coeffs)]
    seed = torch.tensor([5], device="cuda") if options.get("dropout_p") else None
    out = filter_attention(*inputs, None, seed, Options(0.125, **options))
    for x in (out, *torch.autograd.grad(out, inputs, g)):
        assert torch.isfinite(x).all()


def test_huge_scores_stay_finite() -> None:
    """Logsumexps far below zero: keys beyond the last one must not overflow."""
    for length in (100, 197, 300):
        q = torch.full((1, 2, length, 64), -6.0, device="cuda", dtype=BF16)
        k = torch.full_like(q, 6.0)
        v = torch.randn_like(q)
        inputs = [x.requires_grad_() for x in (q, k, v, torch.ones(2, 3, device="cuda"))]
        out = filter_attention(*inputs, None, None, Options(1.0))
        for x in (out, *torch.autograd.grad(out, inputs, torch.randn_like(out))):
            assert torch.isfinite(x).all()


@pytest.mark.parametrize("length", [512, 1024])
def test_attention_at_initialisation_has_attentions_bits(length: int) -> None:
    """Beyond the short kernels' reach the first pass is torch's own."""
    q, k, v = torch.randn(3, 2, 4, length, 64, device="cuda", dtype=BF16).unbind(0)
    coeffs = torch.tensor([0.0, 1.0, 0.0], device="cuda")
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.equal(graph_filter_attention(q, k, v, coeffs, backend="fused"), plain)


PLAIN: dict[str, Any] = {"K": None}
LEARNED = [
    *(
        (options, [on_gpu(3, 4, length, 64, is_causal=True, projected=True)])
        for options in (PLAIN, PLAIN | {"w0": 0.2, "w1": 0.7})
        for length in (128, 1024, 2048)
    ),
    # calls that follow: of the same signature, of another, in other layouts
    *(
        (
            {"w0": 0.2, "w1": 0.7, "wK": 0.4},
            [
                on_gpu(3, 4, length, 64),
                on_gpu(3, 4, length, 64),
                on_gpu(2, 4, length, 64, projected=True),
                on_gpu(2, 4, length, 64, key_heads=2, is_causal=True),
            ],
        )
        for length in (128, 300)
    ),
]


@pytest.mark.parametrize(("options", "problems"), LEARNED, ids=lambda x: str(x)[:60])
def test_a_filter_learns_by_the_kernels(options: dict[str, Any], problems: list[Problem]) -> None:
    """θ's gradient by the kernels, launched directly the second time, against torch's."""
    layer = gfsa.GFSA(4, **options).cuda()
    for problem in problems:
        q, k, v, _, g = problem.tensors()
        results = []
        for backend in ("fused", "fused", "sdpa"):
            inputs = [x.requires_grad_() for x in (q, k, v)] + [layer.theta]
            operator = AttentionOperator(
                *(q, k),
                is_causal=problem.is_causal,
                enable_gqa=problem.key_heads > 0,
                backend=backend,
            )
            y = layer(operator, v)
            results.append([y, *torch.autograd.grad(y, inputs, g)])
        first, again, other = results
        assert_same_bits(first, again)
        for name, x, y in zip(NAMES, first, other, strict=True):
            assert error(x, y) <= 0.02, name


def test_saved_tensors_may_come_back_in_another_layout() -> None:
    q, k, v, coeffs, g = on_gpu(2, 4, 128, 64, projected=True).tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]
    kept = torch.autograd.grad(filter_attention(*inputs, None, None, Options(0.125)), inputs, g)
    with torch.autograd.graph.save_on_cpu():
        y = filter_attention(*inputs, None, None, Options(0.125))
    for name, mine, other in zip(NAMES[1:], torch.autograd.grad(y, inputs, g), kept, strict=True):
        assert torch.equal(mine, other), name


@pytest.mark.parametrize(
    ("length", "powers", "dropout_p", "shares"),
    [
        *((length, 3, dropout_p, 0) for length in (100, 300) for dropout_p in (0.0, 0.1)),
        *((100, 2, 0.0, 0), (300, 2, 0.0, 0), (300, 2, 0.0, 1)),
    ],
)
def test_operator_registration(length: int, powers: int, dropout_p: float, shares: int) -> None:
    tokens = torch.randn(3, 2, 4, length, 64, device="cuda", dtype=BF16)
    if powers == 2:
        tokens = torch.randn(3, 2, length, 4, 64, device="cuda", dtype=BF16).transpose(2, 3)
    numbers = [torch.randn(4, powers, device="cuda"), *[torch.randn(4, device="cuda")] * shares]
    inputs = [x.requires_grad_() for x in (*tokens.unbind(0), *numbers)]
    mask = seed = None
    if dropout_p:
        mask = torch.rand(2, 1, 1, length, device="cuda") < 0.8
        seed = torch.tensor([3], device="cuda")
    share = () if shares else (None,)
    # degree 1 in one pass
    once = powers == 2 and length > 196
    given = (*inputs, *share, mask, seed, 0.125, True, dropout_p, once, True)
    torch.library.opcheck(op.forward, given)


@pytest.mark.parametrize(
    ("degree", "length", "projected", "backend"),
    [
        *((2, length, projected, "fused") for length in (100, 300) for projected in (False, True)),
        # by name and by choice, short kernels and one pass
        *((1, length, False, backend) for length in (128, 1024) for backend in ("fused", "auto")),
    ],
)
def test_compiled_whole(degree: int, length: int, projected: bool, backend: Backend) -> None:
    """By the same kernels; of degree 1 the compiler adds up gradients by itself."""
    q, k, v, coeffs, g = on_gpu(2, 4, length, 64, projected=projected).tensors()
    inputs = [x.detach().requires_grad_() for x in (q, k, v, coeffs[:, : degree + 1])]

    def step(*inputs: Tensor) -> Tensor:
        return graph_filter_attention(*inputs, is_causal=degree == 1, backend=backend) * 2

    eager, compiled = (
        outcome(work, inputs, g) for work in (step, torch.compile(step, fullgraph=True))
    )
    same = 1 if degree == 1 else len(eager)
    assert_same_bits(eager[:same], compiled[:same])
    for name, x, y in zip(NAMES, eager, compiled, strict=True):
        assert error(x, y) <= 0.02, name


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("length", [100, 300])
def test_traced_by_torch_jit(length: int) -> None:
    """A trace does not record launches: it has torch's kernels, also after a call by the fused."""
    coeffs = torch.tensor([0.3, 1.0, -0.6], device="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return graph_filter_attention(q, k, v, coeffs)

    first, other = torch.randn(2, 3, 2, 4, length, 64, device="cuda", dtype=BF16).unbind(0)
    attend(*first)
    with torch.no_grad():
        traced = torch.jit.trace(attend, tuple(first))
    assert error(traced(*other), attend(*other)) <= 4 * torch.finfo(BF16).eps


@pytest.mark.parametrize("length", [100, 300])
def test_captured_in_a_graph(length: int) -> None:
    """Replays compute with what the inputs then hold, and draw a new dropout mask each time."""
    *inputs, g = on_gpu(2, 4, length, 64).tensors()
    inputs = [x.requires_grad_() for x in inputs]

    def step(dropout_p: float) -> list[Tensor]:
        options = {"dropout_p": dropout_p, "backend": "fused"}
        return outcome(partial(graph_filter_attention, **options), inputs, g)

    graph, (plain, dropped) = captured(lambda: (step(0.0), step(0.5)))
    with torch.no_grad():
        inputs[0].copy_(torch.randn_like(inputs[0]))
    graph.replay()
    first = dropped[0].clone()
    assert_same_bits(plain, step(0.0))
    graph.replay()
    assert not torch.equal(first, dropped[0])


@pytest.mark.parametrize("case", [*HOPPER_CASES, *CASES], ids=str)
def test_what_is_said_is_what_runs(case: Case) -> None:
    hopper = routes.capability(torch.device("cuda")) == routes.HOPPER
    if not (hopper and routes.TRITON == routes.MEASURED_TRITON) and case in HOPPER_CASES:
        pytest.skip("written for Hopper GPUs, in the Gluon of certain versions of Triton")
    check(case, "cuda", BF16)
