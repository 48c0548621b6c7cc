"""Compiled attention by blocks of queries on a GPU, under the registered operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gfsa.operators import AttentionOperator, DenseOperator, Visibility, blocked
from support.attention import relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

B, H, KV, N, D = 2, 4, 2, 1024, 64


def described(name: str) -> Visibility:
    keys = torch.ones(B, 1, N, dtype=torch.bool, device="cuda")
    keys[0, :, : N // 3] = False
    if name == "documents":
        documents = torch.arange(N, device="cuda")[None] // 300
        return Visibility(causal=True, documents=documents, in_order=True)
    return Visibility(keys, causal=True, window=200 if name == "padding and window" else None)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 3e-2)],
)
@pytest.mark.parametrize("entries", [2**16, 2**25])
@pytest.mark.parametrize("name", ["causal padding", "documents", "padding and window"])
def test_a_compiled_step_is_the_dense_one(
    name: str,
    entries: int,
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocked, "MOST_ENTRIES", entries)
    torch._dynamo.reset()
    torch.manual_seed(0)
    visible = described(name)
    given = [torch.randn(B, h, N, D, device="cuda", dtype=dtype) for h in (H, KV, KV)]
    coeffs = torch.tensor([[0.3, 0.9, -0.4]] * H, device="cuda", dtype=torch.float64)

    def attend(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
        operator = AttentionOperator(q, k, enable_gqa=True, visible=visible, backend="sdpa")
        return operator.polynomial(coeffs, v)

    inputs = [*given, coeffs.to(torch.promote_types(dtype, torch.float32))]
    inputs = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v, c = exact
    dense = DenseOperator.from_qk(q, k, visible.rows(0, N, N, q.device))
    expected = dense.polynomial(c, v)
    y = torch.compile(attend, fullgraph=True)(*inputs)
    assert relative_error(y, expected) < tolerance
    g = torch.randn_like(y)
    gradients = torch.autograd.grad(y, inputs, g)
    for got, wanted in zip(
        gradients, torch.autograd.grad(expected, exact, g.double()), strict=True
    ):
        assert relative_error(got, wanted) < tolerance
