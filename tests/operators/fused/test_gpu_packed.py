"""Documents and windows on a GPU: as exact as torch's attention, no tensor of N×N, graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from gfsa.functional import graph_filter_attention
from gfsa.operators import AttentionOperator, Visibility
from gfsa.operators.fused import eligibility
from gfsa.operators.fused.dispatch import backward_path, run_backward, run_forward
from gfsa.operators.fused.hopper import backward_path as hopper_backward
from gfsa.operators.fused.long import launch as long
from gfsa.operators.fused.problem import Options, Saved
from support.fused_cases import NAMES, error
from support.packed_cases import Packed, assert_as_exact_as_attention, run

BF16, FP16 = torch.bfloat16, torch.float16
MIXED = [1800, 64, 1, 2500, 77, 640, 1, 1, 1000, 128, 300, 1680]


def on_gpu(*rows: list[int], **options: object) -> Packed:
    return Packed(rows, device="cuda", **{"head_dim": 64, "dtype": BF16, **options})  # type: ignore[arg-type]


CASES = [
    on_gpu([700, 300, 1, 1047]),
    on_gpu([700, 300, 1, 1047], dtype=FP16, window=256, projected=True),
    on_gpu([700, 300, 1, 1047], head_dim=128),
    on_gpu([700, 300, 1, 1047], head_dim=128, dtype=FP16, heads=4, key_heads=2, window=300),
    on_gpu([64, 128, 256, 64], [500, 12], [512], heads=4, key_heads=1, projected=True),
    on_gpu([513, 1, 486], window=100),
    on_gpu([50, 50]),
    on_gpu([1000, 1, 24], head_dim=80),
    on_gpu([1024], window=16, dtype=FP16),
    on_gpu([300, 212], dropout_p=0.1, heads=4),
    on_gpu([300, 212], scale=-0.2, head_dim=128),
    on_gpu(MIXED),
    on_gpu(MIXED, head_dim=128, key_heads=1),
    on_gpu([8192], head_dim=128, dtype=FP16, window=1024),
    # one sweep
    on_gpu(MIXED, heads=12, key_heads=4),
    on_gpu(MIXED[::-1], heads=12, head_dim=128, window=700, projected=True),
]


@pytest.mark.parametrize("packed", CASES, ids=str)
def test_as_exact_as_attention(packed: Packed) -> None:
    assert_as_exact_as_attention(packed)


# documents as long as a block of a gradient that begin one, two and three rows behind multiples of
# 4, where the copy engine takes no numbers in float32; cut short by the next one; more of them than
# blocks may begin with
BESIDE_16_BYTES = [129, 130, 131, 257, 1, 135, 241]
PLANNED = [
    on_gpu(BESIDE_16_BYTES),
    on_gpu(BESIDE_16_BYTES, BESIDE_16_BYTES[::-1], dtype=FP16, heads=4, key_heads=2),
    on_gpu(BESIDE_16_BYTES, head_dim=128, heads=4, key_heads=1, projected=True),
    on_gpu(BESIDE_16_BYTES, head_dim=128, dtype=FP16, window=150),
    on_gpu(BESIDE_16_BYTES, window=65, projected=True),
    on_gpu(BESIDE_16_BYTES, head_dim=96, heads=3),
    on_gpu(BESIDE_16_BYTES, head_dim=40, scale=-0.2),
    on_gpu([65] * 40, heads=4),
    on_gpu([129] * 40, head_dim=128),
    on_gpu([1, 2, 1021], [1023, 1], [511, 513]),
]


@pytest.mark.parametrize("packed", PLANNED, ids=str)
def test_gradients_of_documents_that_begin_with_blocks(packed: Packed) -> None:
    q, k, v, *_ = packed.tensors()
    spans = packed.visible().spans(packed.length, q.device)
    on_hopper = eligibility.refusal_by_hopper_backward(q, spans, 0.0) is None
    options = Options(0.1, True)
    assert (backward_path(q, k, v, spans, options) is hopper_backward) == on_hopper
    assert_as_exact_as_attention(packed)


@pytest.mark.parametrize("packed", [PLANNED[1], PLANNED[2]], ids=str)
def test_gradients_beside_nothing_but_their_own_memory(packed: Packed) -> None:
    """Tokens in a sea of NaN: rows that a block does not own are neither read nor written."""
    q, k, v, coeffs, g = packed.tensors()
    spans = packed.visible().spans(packed.length, q.device)
    options = Options(packed.head_dim**-0.5, True)
    out, u, lse = run_forward(long, q, k, v, coeffs, spans, None, options)
    path = backward_path(q, k, v, spans, options)
    saved = Saved(q, k, v, u, out, lse, coeffs, spans)
    expected = run_backward(path, g, saved, options)
    inside = []
    for x in (g, q, k, v, u, out):
        sea = torch.full((*x.shape[:2], x.shape[2] + 200, x.shape[3]), float("nan")).to(x)
        inside.append(sea[:, :, 100:-100].copy_(x))
    got = run_backward(path, inside[0], Saved(*inside[1:], lse, coeffs, spans), options)
    for x, y in zip(got, expected, strict=True):
        assert torch.isfinite(x).all()
        assert torch.equal(x, y)


def test_gradients_of_more_than_two_billion_numbers() -> None:
    """Rows that are cut short lie 2³¹ numbers or more behind the first one."""
    documents, heads, dim = [1001] * 525, 64, 64
    length = sum(documents) // 4 * 4
    documents[-1] -= sum(documents) - length
    assert length * heads * dim >= 2**31
    if torch.cuda.mem_get_info()[0] < 90 * 2**30:
        pytest.skip("needs 90 GiB of free memory")

    def tokens() -> Tensor:
        x = torch.empty(1, length, heads, dim, device="cuda", dtype=BF16)
        return x.normal_().transpose(1, 2)

    q, k, v, g = (tokens() for _ in range(4))
    coeffs = torch.rand(heads, 3, device="cuda")
    starts = [1001 * i for i in range(len(documents))]
    visible = Visibility.packed(torch.tensor(starts, device="cuda"), length)
    spans, options = visible.spans(length, q.device), Options(0.1, True)
    out, u, lse = run_forward(long, q, k, v, coeffs, spans, None, options)
    path = backward_path(q, k, v, spans, options)
    dq, dk, dv, _ = run_backward(path, g, Saved(q, k, v, u, out, lse, coeffs, spans), options)
    for start, size in ((starts[-2], documents[-2]), (starts[0], documents[0])):
        parts = [x.narrow(2, start, size).contiguous() for x in (g, q, k, v, u, out, lse)]
        saved = Saved(*parts[1:], coeffs)
        for x, y in zip((dq, dk, dv), run_backward(long, parts[0], saved, options), strict=False):
            assert error(x.narrow(2, start, size), y) <= torch.finfo(BF16).eps


@pytest.mark.parametrize("packed", [CASES[0], CASES[3], CASES[12], PLANNED[1]], ids=str)
def test_the_same_bits_again(packed: Packed) -> None:
    """Also of launches that bypass Triton's launcher, from the second call on."""
    results = []
    for _ in range(3):
        torch.manual_seed(2)
        results.append(run(packed)[0])
    for again in results[1:]:
        for name, x, y in zip(NAMES, results[0], again, strict=True):
            assert torch.equal(x, y), name


@pytest.mark.parametrize("heads", [2, pytest.param(12, id="one sweep")])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_documents_are_documents_alone(head_dim: int, heads: int) -> None:
    packed = on_gpu(MIXED, head_dim=head_dim, heads=heads)
    q, k, v, coeffs, g = packed.tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]
    together = AttentionOperator(q, k, visible=packed.visible(), backend="fused")
    y = together.polynomial(coeffs, v)
    alone = [
        graph_filter_attention(*parts, coeffs, is_causal=True)
        for parts in zip(*(x.split(MIXED, 2) for x in (q, k, v)), strict=True)
    ]
    z = torch.cat(alone, 2)
    grads = [torch.autograd.grad(out, inputs, g) for out in (y, z)]
    for name, mine, other in zip(NAMES, (y, *grads[0]), (z, *grads[1]), strict=True):
        assert error(mine, other) <= 0.02, name


def test_memory_is_linear_in_the_length() -> None:
    """A bool mask of all queries and keys alone would take 64 MiB."""
    packed = on_gpu(MIXED)
    q, k, v, coeffs, g = packed.tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]

    def step() -> None:
        operator = AttentionOperator(q, k, visible=packed.visible(), backend="fused")
        torch.autograd.grad(operator.polynomial(coeffs, v), inputs, g)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    taken = torch.cuda.max_memory_allocated() - before
    print(f"{taken / 2**20:.1f} MiB, q takes {q.numel() * 2 / 2**20:.1f}")
    assert taken <= 12 * q.numel() * q.element_size()


def step_of(documents: Tensor, inputs: list[Tensor], g: Tensor) -> list[Tensor]:
    q, k, v, coeffs = inputs
    visible = Visibility(causal=True, documents=documents, in_order=True)
    y = AttentionOperator(q, k, visible=visible, backend="fused").polynomial(coeffs, v)
    return [y, *torch.autograd.grad(y, inputs, g)]


def test_captured_in_a_graph() -> None:
    """Replays see the documents that the caller has written since."""
    first, second = on_gpu([200, 312]), on_gpu([400, 50, 62])
    q, k, v, coeffs, g = first.tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]
    documents = first.visible().documents
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step_of(documents, inputs, g)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step_of(documents, inputs, g)
    for packed in (first, second):
        documents.copy_(packed.visible().documents)
        graph.replay()
        for name, x, y in zip(NAMES, replayed, step_of(documents, inputs, g), strict=True):
            assert torch.equal(x, y), name


def test_compiled_whole() -> None:
    packed = on_gpu([200, 312])
    q, k, v, coeffs, g = packed.tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]

    def forward(documents: Tensor, *inputs: Tensor) -> Tensor:
        q, k, v, coeffs = inputs
        visible = Visibility(causal=True, window=150, documents=documents, in_order=True)
        return AttentionOperator(q, k, visible=visible, backend="fused").polynomial(coeffs, v)

    documents = packed.visible().documents
    y = forward(documents, *inputs)
    z = torch.compile(forward, fullgraph=True)(documents, *inputs)
    assert torch.equal(y, z)
    for a, b in zip(
        torch.autograd.grad(y, inputs, g), torch.autograd.grad(z, inputs, g), strict=True
    ):
        assert torch.equal(a, b)
