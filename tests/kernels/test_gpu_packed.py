"""Documents and windows on a GPU: as exact as torch's attention, no tensor of N×N, graphs."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from gfsa.filters import GFSA
from gfsa.functional import graph_filter_attention
from gfsa.kernels import op
from gfsa.kernels.routes import Backend
from gfsa.operators import AttentionOperator, Visibility
from support.capturing import captured
from support.fused_cases import NAMES, assert_same_bits, error, outcome
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


# in one pass, and by the kernels of degree 2: other head dims, dropout, a negative scale
DEGREE_ONE = [
    *(dataclasses.replace(packed, degree=1) for packed in CASES),
    on_gpu([1] * 100 + [63, 65, 127, 129, 16], head_dim=128, degree=1),
    on_gpu([100, 300, 100], head_dim=72, degree=1),
    on_gpu([1024], window=1, degree=1),
    # longer than what one pass takes without documents
    on_gpu([*MIXED, 1000], key_heads=1, window=2000, degree=1),
]


@pytest.mark.parametrize("packed", [*CASES, *DEGREE_ONE], ids=str)
def test_as_exact_as_attention(packed: Packed) -> None:
    assert_as_exact_as_attention(packed)


REPEATED = [CASES[0], CASES[3], CASES[12]]
REPEATED += [dataclasses.replace(packed, degree=1) for packed in REPEATED]


@pytest.mark.parametrize("packed", REPEATED, ids=str)
def test_the_same_bits_again(packed: Packed) -> None:
    """Also of launches that bypass Triton's launching, from the second call on."""
    results = []
    for _ in range(3):
        torch.manual_seed(2)
        results.append(run(packed)[0])
    assert_same_bits(*results)


@pytest.mark.parametrize("heads", [2, pytest.param(12, id="one sweep")])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("degree", [1, 2])
def test_packed_documents_are_documents_alone(degree: int, head_dim: int, heads: int) -> None:
    packed = on_gpu(MIXED, head_dim=head_dim, heads=heads, degree=degree)
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


@pytest.mark.parametrize("degree", [1, 2])
def test_memory_is_linear_in_the_length(degree: int) -> None:
    """A bool mask of all queries and keys alone would take 64 MiB."""
    packed = on_gpu(MIXED, degree=degree)
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


@pytest.mark.parametrize("degree", [1, 2])
def test_captured_in_a_graph(degree: int) -> None:
    """Replays see the documents that the caller has written since."""
    first, second = on_gpu([200, 312], degree=degree), on_gpu([400, 50, 62])
    q, k, v, coeffs, g = first.tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]
    documents = first.visible().documents
    graph, replayed = captured(lambda: step_of(documents, inputs, g))
    for packed in (first, second):
        documents.copy_(packed.visible().documents)
        graph.replay()
        assert_same_bits(replayed, step_of(documents, inputs, g))


@pytest.mark.parametrize("degree", [1, 2])
def test_compiled_whole(degree: int) -> None:
    packed = on_gpu([200, 312], degree=degree)
    q, k, v, coeffs, g = packed.tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]

    def forward(documents: Tensor, *inputs: Tensor) -> Tensor:
        q, k, v, coeffs = inputs
        visible = Visibility(causal=True, window=150, documents=documents, in_order=True)
        return AttentionOperator(q, k, visible=visible, backend="fused").polynomial(coeffs, v)

    documents = packed.visible().documents
    compiled = torch.compile(forward, fullgraph=True)
    results = [outcome(partial(each, documents), inputs, g) for each in (forward, compiled)]
    assert_same_bits(*results)


@pytest.mark.parametrize("backend", ["auto", "fused"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_degree_one_is_one_pass(
    head_dim: int, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filter's learned numbers too, whose gradient is that of torch's attention by rows."""
    packed = on_gpu(MIXED, head_dim=head_dim, heads=4, key_heads=2, degree=1)
    q, k, v, _, g = packed.tensors()
    layer = GFSA(4, K=None, w0=0.3, w1=0.8).cuda()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    taken, run = [], op.run_forward

    def note(*args: Any) -> Any:
        taken.append(args[5])
        return run(*args)

    monkeypatch.setattr(op, "run_forward", note)
    results = []
    for name in (backend, "sdpa"):
        operator = AttentionOperator(q, k, visible=packed.visible(), enable_gqa=True, backend=name)
        y = layer(operator, v)
        results.append([y, *torch.autograd.grad(y, [*inputs, layer.theta], g)])
    assert [mask.dtype for mask in taken] == [torch.int32]
    for name, mine, other in zip(NAMES, *results, strict=True):
        assert error(mine, other) <= 0.02, name


def test_degree_one_registration() -> None:
    packed = on_gpu([200, 312], degree=1)
    q, k, v, coeffs, _ = packed.tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]
    spans = packed.visible().spans(packed.length, q.device)
    given = (*inputs, None, spans, None, 0.125, True, 0.0, True, True)
    torch.library.opcheck(op.forward, given)
