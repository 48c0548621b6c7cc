"""The fused kernels on a GPU, under FlashAttention's rule, over all that they promise to take."""

from __future__ import annotations

import random
from collections.abc import Callable

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
from gfsa.operators import AttentionOperator, DenseOperator
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
    Problem(2, 4, 64, 64, dtype=BF16, device="cuda"),
    Problem(2, 4, 128, 64, dtype=BF16, device="cuda", projected=True),
    Problem(2, 4, 197, 64, dtype=BF16, device="cuda", projected=True),
    Problem(2, 4, 197, 64, dtype=FP16, device="cuda", is_causal=True),
    Problem(2, 4, 256, 64, dtype=BF16, device="cuda"),
    Problem(3, 4, 128, 64, dtype=BF16, device="cuda", mask="keys"),
    Problem(3, 4, 100, 64, dtype=BF16, device="cuda", mask="keys", dropout_p=0.1),
    Problem(3, 4, 197, 64, dtype=BF16, device="cuda", mask="keys", is_causal=True),
    Problem(3, 4, 250, 64, dtype=BF16, device="cuda", dropout_p=0.1),
    Problem(2, 4, 128, 64, 2, dtype=BF16, device="cuda", is_causal=True, projected=True),
    Problem(3, 4, 60, 64, dtype=BF16, device="cuda", mask="full"),
    Problem(3, 4, 128, 64, dtype=BF16, device="cuda", mask="full", projected=True),
    Problem(3, 4, 128, 64, 2, dtype=BF16, device="cuda", mask="full", is_causal=True),
    Problem(2, 4, 200, 64, dtype=BF16, device="cuda", mask="full", dropout_p=0.1),
    Problem(2, 4, 256, 64, dtype=FP16, device="cuda", mask="full"),
    Problem(2, 4, 128, 64, dtype=BF16, device="cuda", mask="per head"),
    Problem(1, 2, 17, 8, dtype=BF16, device="cuda"),
    Problem(1, 2, 2500, 128, dtype=BF16, device="cuda", projected=True),
    Problem(2, 2, 2048, 128, dtype=BF16, device="cuda", is_causal=True),
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
    Problem(2, 4, 300, 64, dtype=BF16, device="cuda"),
    Problem(3, 4, 1024, 64, dtype=FP16, device="cuda", is_causal=True, projected=True),
    Problem(2, 6, 1100, 48, 2, dtype=BF16, device="cuda", is_causal=True, scale=-0.2),
    Problem(2, 4, 260, 8, dtype=BF16, device="cuda", scale=0.3),
    Problem(2, 4, 200, 96, dtype=FP16, device="cuda", projected=True),
    Problem(2, 8, 1500, 80, 4, dtype=BF16, device="cuda"),
    Problem(1, 4, 1996, 128, 1, dtype=FP16, device="cuda", is_causal=True, projected=True),
    Problem(2, 2, 1920, 128, dtype=BF16, device="cuda"),
    Problem(12, 16, 1024, 64, dtype=BF16, device="cuda", is_causal=True),
    Problem(3, 4, 512, 64, dtype=BF16, device="cuda", mask="keys"),
    Problem(3, 4, 1000, 64, 2, dtype=FP16, device="cuda", mask="keys", is_causal=True),
    Problem(2, 2, 644, 72, dtype=BF16, device="cuda", mask="keys", projected=True),
    Problem(2, 3, 1500, 80, dtype=BF16, device="cuda", mask="keys", is_causal=True),
    Problem(3, 4, 1000, 128, 2, dtype=BF16, device="cuda", mask="keys", is_causal=True),
    Problem(2, 4, 2048, 128, 1, dtype=FP16, device="cuda", mask="keys", is_causal=True),
    Problem(2, 4, 1024, 128, dtype=BF16, device="cuda", mask="keys", projected=True),
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
    q, k, v, coeffs, g = Problem(2, 4, 512, 64, dtype=BF16, device="cuda").tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]
    mask = torch.ones(2, 1, 1, 512, dtype=torch.bool, device="cuda")
    # the last keys too: they are the ones that are far away
    mask[0, ..., :100] = mask[1, ..., 450:] = False
    results = []
    for keys in (mask, spread(mask, -1)):
        out = filter_attention(*inputs, keys, None, Options(0.125, is_causal))
        results.append([out, *torch.autograd.grad(out, inputs, g)])
    assert_same_bits(*results)


@pytest.mark.usefixtures("_without_hopper_kernels")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("c2", [0.0, 1e-6, -1e-4, 0.01])
def test_a_weak_second_pass_over_wide_heads(c2: float, dtype: torch.dtype) -> None:
    """The output tells what the second pass was, within its rounding."""
    problem = Problem(2, 2, 2048, 128, dtype=dtype, device="cuda", is_causal=True)
    q, k, v, _, g = problem.tensors()
    coeffs = torch.tensor([[0.2, 0.9, c2], [0.0, 1.0, -c2]], device="cuda")
    results = []
    for backend, inputs in (
        ("fused", [q, k, v, coeffs]),
        ("dense", [x.double() for x in (q, k, v, coeffs)]),
    ):
        inputs = [x.detach().requires_grad_() for x in inputs]
        y = graph_filter_attention(*inputs, is_causal=True, backend=backend)
        results.append([y.detach(), *torch.autograd.grad(y, inputs, g.to(y.dtype))])
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
    Problem(2, 4, 128, 64, dtype=BF16, device="cuda", projected=True),
    Problem(2, 4, 197, 64, dtype=BF16, device="cuda", mask="keys"),
    Problem(2, 4, 1024, 64, dtype=BF16, device="cuda", is_causal=True, projected=True),
    Problem(3, 4, 513, 40, dtype=FP16, device="cuda", mask="keys", is_causal=True),
    Problem(2, 4, 1000, 64, dtype=BF16, device="cuda", scale=0.3),
    Problem(2, 4, 256, 32, dtype=FP16, device="cuda", is_causal=True, projected=True),
    Problem(2, 4, 300, 64, dtype=FP16, device="cuda", mask="full"),
    Problem(2, 4, 2048, 64, dtype=BF16, device="cuda", is_causal=True),
    Problem(2, 3, 2048, 128, dtype=FP16, device="cuda"),
    Problem(2, 3, 513, 80, dtype=BF16, device="cuda", scale=-0.2),
    # the Hopper gradient: lengths that fill no tile, after each of the forward passes
    Problem(2, 3, 333, 64, dtype=FP16, device="cuda"),
    Problem(2, 3, 1501, 64, dtype=BF16, device="cuda"),
    Problem(2, 3, 1501, 64, dtype=FP16, device="cuda", is_causal=True, projected=True),
    # heads that share keys: short, one pass, in one sweep, around torch's attention
    Problem(2, 4, 100, 64, key_heads=2, dtype=BF16, device="cuda", is_causal=True),
    Problem(2, 8, 700, 64, key_heads=2, dtype=BF16, device="cuda", projected=True),
    Problem(2, 8, 2048, 64, key_heads=2, dtype=BF16, device="cuda", is_causal=True, projected=True),
    Problem(2, 8, 1500, 64, key_heads=2, dtype=FP16, device="cuda"),
    Problem(2, 8, 300, 128, key_heads=2, dtype=BF16, device="cuda", is_causal=True),
    Problem(2, 6, 300, 80, key_heads=2, dtype=FP16, device="cuda", mask="keys", projected=True),
    Problem(2, 8, 1500, 128, key_heads=2, dtype=FP16, device="cuda"),
    # wide heads in one sweep; the last two with cuDNN's gradient
    Problem(2, 3, 1024, 128, dtype=BF16, device="cuda", is_causal=True),
    Problem(2, 3, 1500, 128, dtype=FP16, device="cuda", is_causal=True, projected=True),
    Problem(2, 8, 2048, 128, key_heads=2, dtype=BF16, device="cuda", is_causal=True),
    Problem(
        2, 8, 1301, 128, key_heads=2, dtype=BF16, device="cuda", is_causal=True, projected=True,
        scale=0.2,
    ),
    Problem(1, 3, 4100, 128, dtype=FP16, device="cuda", is_causal=True, projected=True),
    Problem(1, 4, 5000, 128, key_heads=2, dtype=BF16, device="cuda", is_causal=True),
]  # fmt: skip


@pytest.mark.parametrize("problem", ONCE, ids=str)
def test_degree_one_as_exact_as_attention(problem: Problem) -> None:
    torch.manual_seed(1)
    q, k, v, coeffs, g = problem.tensors()
    mask = problem.bool_mask()
    results = []
    for backend, dtype in (("fused", problem.dtype), ("dense", torch.float64)):
        tokens = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        numbers = coeffs[:, :2].to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        y = graph_filter_attention(
            *tokens,
            numbers,
            mask,
            is_causal=problem.is_causal,
            scale=problem.scale,
            enable_gqa=problem.key_heads > 0,
            backend=backend,
        )
        results.append([y.detach(), *torch.autograd.grad(y, [*tokens, numbers], g.to(dtype))])
    floor = 0.2 * torch.finfo(problem.dtype).eps
    plain = [2 * each + floor for each in attention_errors(problem)]
    for name, most, mine, exact in zip(NAMES, [*plain, 5e-3], *results, strict=True):
        assert torch.isfinite(mine).all(), name
        assert error(mine, exact) <= most, name


@pytest.mark.parametrize("length", [128, 1024, 2048])
@pytest.mark.parametrize("untouched", [False, True], ids=["a filter", "at initialisation"])
def test_degree_one_learns(length: int, untouched: bool) -> None:
    """θ's gradient by the kernels, launched directly the second time, against torch's."""
    layer = gfsa.GFSA(4, K=None, **({} if untouched else {"w0": 0.2, "w1": 0.7})).cuda()
    problem = Problem(3, 4, length, 64, dtype=BF16, device="cuda", is_causal=True, projected=True)
    q, k, v, _, g = problem.tensors()
    inputs = [x.requires_grad_() for x in (q, k, v)] + [layer.theta]
    results = []
    for backend in ("fused", "fused", "sdpa"):
        y = layer(AttentionOperator(q, k, is_causal=True, backend=backend), v)
        results.append([y.detach(), *torch.autograd.grad(y, inputs, g)])
    for name, first, again, other in zip(NAMES, *results, strict=True):
        assert torch.equal(first, again), name
        assert error(first, other) <= 0.02, name


@pytest.mark.parametrize("length", [128, 1024])
def test_degree_one_compiled(length: int) -> None:
    """By name and by choice, short kernels and one pass."""
    q, k, v, coeffs, g = Problem(2, 4, length, 64, dtype=BF16, device="cuda").tensors()
    inputs = [x.detach().requires_grad_() for x in (q, k, v, coeffs[:, :2])]
    for backend in ("fused", "auto"):

        def step(*inputs: Tensor, backend: str = backend) -> Tensor:
            return graph_filter_attention(*inputs, is_causal=True, backend=backend) * 2

        y, z = step(*inputs), torch.compile(step, fullgraph=True)(*inputs)
        # the same kernels in both
        assert torch.equal(y, z), backend
        for name, a, b in zip(
            NAMES[1:],
            torch.autograd.grad(y, inputs, g),
            torch.autograd.grad(z, inputs, g),
            strict=True,
        ):
            assert error(a, b) <= 0.02, (backend, name)


@pytest.mark.parametrize(("length", "shares"), [(100, 0), (300, 0), (300, 1)])
def test_degree_one_registration(length: int, shares: int) -> None:
    tokens = torch.randn(3, 2, length, 4, 64, device="cuda", dtype=BF16).transpose(2, 3).unbind(0)
    numbers = [torch.randn(4, 2, device="cuda"), *[torch.randn(4, device="cuda")] * shares]
    inputs = [x.requires_grad_() for x in (*tokens, *numbers)]
    share = () if shares else (None,)
    given = (*inputs, *share, None, None, 0.125, True, 0.0, length > 196, True)
    torch.library.opcheck(op.forward, given)


def test_degree_one_keeps_nothing_without_a_gradient() -> None:
    """The same kernel, without A·V: the same bits, in less memory."""
    q, k, v, coeffs, _ = Problem(1, 4, 4000, 128, 2, dtype=BF16, device="cuda").tensors()
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
    problem = Problem(2, 3, length, 64, dtype=BF16, device="cuda", is_causal=True)
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
    Problem(2, 4, 100, 64, dtype=BF16, device="cuda"),
    Problem(2, 4, 300, 64, 2, dtype=FP16, device="cuda", projected=True),
    Problem(2, 4, 1000, 64, dtype=BF16, device="cuda", is_causal=True, projected=True),
    Problem(2, 6, 1024, 64, 2, dtype=FP16, device="cuda", is_causal=True),
    Problem(2, 4, 1025, 128, 1, dtype=BF16, device="cuda", is_causal=True),
    Problem(1, 4, 4500, 128, 2, dtype=BF16, device="cuda", is_causal=True, projected=True),
    Problem(2, 4, 300, 96, dtype=BF16, device="cuda", is_causal=True),
    Problem(2, 4, 300, 256, 2, dtype=BF16, device="cuda", is_causal=True, projected=True),
    Problem(3, 4, 300, 64, dtype=BF16, device="cuda", mask="keys"),
    Problem(2, 4, 300, 64, dtype=BF16, device="cuda", mask="full"),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("problem", EXCLUSIVE, ids=str)
def test_the_exclusive_term(problem: Problem, compiled: bool) -> None:
    """As exact as attention; tokens without a direction, too."""
    torch.manual_seed(1)
    q, k, v, coeffs, g = problem.tensors()
    # bf16's own rounding of these is not the kernels'
    v[0, 0, 5] = 0.0
    mask, grouped = problem.bool_mask(), bool(problem.key_heads)
    share = torch.rand(problem.heads, device="cuda")
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs[:, :2].contiguous(), share)]

    def filtered(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor, share: Tensor) -> Tensor:
        options = {"is_causal": problem.is_causal, "enable_gqa": grouped}
        return graph_filter_attention(q, k, v, coeffs, mask, exclusive=share, **options)

    # one mask for all calls
    work = torch.compile(filtered, fullgraph=True, dynamic=False) if compiled else filtered
    out = work(*inputs)
    got = [out, *torch.autograd.grad(out, inputs, g)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    operator = DenseOperator.from_qk(*exact[:2], mask, problem.is_causal)
    out = operator.polynomial(exact[3], exact[2], exact[4])
    expected = [out, *torch.autograd.grad(out, exact, g.double())]
    plain = [2 * e + 0.5 * torch.finfo(problem.dtype).eps for e in attention_errors(problem)]
    for name, x, y, most in zip((*NAMES, "da"), got, expected, [*plain, 5e-3, 5e-3], strict=True):
        assert torch.isfinite(x).all(), name
        assert error(x, y) <= most, (name, error(x, y), most)


def test_the_exclusive_term_gives_the_same_bits_again() -> None:
    problem = Problem(4, 5, 1024, 64, dtype=BF16, device="cuda", is_causal=True)
    q, k, v, coeffs, g = problem.tensors()
    share = coeffs[:, 2].contiguous()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs[:, :2], share)]
    options = Options(0.125, is_causal=True, exclusive=True)
    results = []
    for _ in range(3):
        out = filter_attention(*inputs[:4], None, None, options, once=True, share=share)
        results.append([out, *torch.autograd.grad(out, inputs, g)])
    assert_same_bits(*results)


@pytest.mark.parametrize("exclusive", [None, 0.7])
def test_degree_one_in_a_captured_graph(exclusive: float | None) -> None:
    q, k, v, coeffs, g = Problem(2, 4, 512, 64, dtype=BF16, device="cuda").tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs[:, :2].contiguous())]

    def step() -> list[Tensor]:
        y = graph_filter_attention(*inputs, is_causal=True, backend="fused", exclusive=exclusive)
        return [y, *torch.autograd.grad(y, inputs, g)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(found, expected)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_handful_of_tokens(length: int, is_causal: bool) -> None:
    """Too few for errors to average out: measured by the largest result instead."""
    torch.manual_seed(4)
    problem = Problem(2, 4, length, 64, is_causal=is_causal, dtype=BF16, device="cuda")
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


def test_both_paths_take_what_they_should() -> None:
    q = torch.randn(1, 1, 197, 64, device="cuda", dtype=BF16)
    if routes.capability(q.device) == (9, 0) and routes.TRITON == (3, 6):
        assert kernels_for(q, None, Options(0.1)).forward == "short"
    longer = torch.randn(1, 1, 300, 64, device="cuda", dtype=BF16)
    assert kernels_for(longer, None, Options(0.1)).forward == "two_pass"
    assert kernels_for(q, None, Options(-0.1)).forward == "two_pass"
    mask = torch.ones(1, 2, 197, 197, device="cuda", dtype=torch.bool)
    assert kernels_for(q, mask, Options(0.1)).forward == "two_pass"
    assert kernels_for(q, mask[:, :1].mT, Options(0.1)).forward == "two_pass"
    if routes.capability(q.device) == (9, 0) and routes.TRITON == (3, 6):
        assert kernels_for(q, mask[:, :1], Options(0.1)).forward == "short"


@pytest.mark.parametrize("length", [512, 1024])
def test_attention_at_initialisation_has_attentions_bits(length: int) -> None:
    """Beyond the short kernels' reach the first pass is torch's own."""
    q, k, v = torch.randn(3, 2, 4, length, 64, device="cuda", dtype=BF16).unbind(0)
    coeffs = torch.tensor([0.0, 1.0, 0.0], device="cuda")
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.equal(graph_filter_attention(q, k, v, coeffs, backend="fused"), plain)


@pytest.mark.parametrize("length", [128, 300])
def test_a_filter_learns_by_the_kernels(length: int) -> None:
    """θ's gradient, and calls that follow: of the same signature, of another, in other layouts."""
    layer = gfsa.GFSA(4, w0=0.2, w1=0.7, wK=0.4).cuda()
    for problem in (
        Problem(3, 4, length, 64, dtype=BF16, device="cuda"),
        Problem(3, 4, length, 64, dtype=BF16, device="cuda"),
        Problem(2, 4, length, 64, dtype=BF16, device="cuda", projected=True),
        Problem(2, 4, length, 64, 2, dtype=BF16, device="cuda", is_causal=True),
    ):
        q, k, v, _, g = problem.tensors()
        grouped = bool(problem.key_heads)
        inputs = [x.requires_grad_() for x in (q, k, v)] + [layer.theta]
        results = []
        for backend in ("fused", "sdpa"):
            operator = AttentionOperator(
                q, k, is_causal=problem.is_causal, enable_gqa=grouped, backend=backend
            )
            y = layer(operator, v)
            results.append([y.detach(), *torch.autograd.grad(y, inputs, g)])
        for name, mine, other in zip(NAMES, *results, strict=True):
            assert error(mine, other) <= 0.02, name


def test_saved_tensors_may_come_back_in_another_layout() -> None:
    q, k, v, coeffs, g = Problem(2, 4, 128, 64, dtype=BF16, device="cuda", projected=True).tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]
    kept = torch.autograd.grad(filter_attention(*inputs, None, None, Options(0.125)), inputs, g)
    with torch.autograd.graph.save_on_cpu():
        y = filter_attention(*inputs, None, None, Options(0.125))
    for name, mine, other in zip(NAMES[1:], torch.autograd.grad(y, inputs, g), kept, strict=True):
        assert torch.equal(mine, other), name


@pytest.mark.parametrize("length", [100, 300])
def test_operator_registration(length: int) -> None:
    q, k, v = torch.randn(3, 2, 4, length, 64, device="cuda", dtype=BF16).unbind(0)
    inputs = [x.requires_grad_() for x in (q, k, v, torch.randn(4, 3, device="cuda"))]
    mask = torch.rand(2, 1, 1, length, device="cuda") < 0.8
    seed = torch.tensor([3], device="cuda")
    for mask_, seed_, dropout_p in ((None, None, 0.0), (mask, seed, 0.1)):
        given = (*inputs, None, mask_, seed_, 0.125, True, dropout_p, False, True)
        torch.library.opcheck(op.forward, given)


@pytest.mark.parametrize("length", [100, 300])
@pytest.mark.parametrize("projected", [False, True])
def test_compiled_whole(length: int, projected: bool) -> None:
    problem = Problem(2, 4, length, 64, dtype=BF16, device="cuda", projected=projected)
    q, k, v, coeffs, g = problem.tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        return graph_filter_attention(*inputs, backend="fused") * 2

    compiled = torch.compile(step, fullgraph=True)
    assert_same_bits(outcome(step, inputs, g), outcome(compiled, inputs, g))


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
    problem = Problem(2, 4, length, 64, dtype=BF16, device="cuda")
    q, k, v, coeffs, g = problem.tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]

    def step(dropout_p: float) -> list[torch.Tensor]:
        y = graph_filter_attention(*inputs, dropout_p=dropout_p, backend="fused")
        return [y, *torch.autograd.grad(y, inputs, g)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(0.0)
        step(0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain, dropped = step(0.0), step(0.5)
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
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
