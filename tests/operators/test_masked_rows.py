"""Rows whose keys are all masked: c0·v, never NaN, in values and in gradients."""

import math

import pytest
import torch

from gfsa import graph_filter_attention
from support.attention import BACKENDS, reference_attention, relative_error, tokens

LENGTH = 6
EMPTY = torch.tensor([True, False, False, True, False, False])
ALLOWED = ~EMPTY[:, None] & torch.ones(LENGTH, LENGTH, dtype=torch.bool)
BIAS = torch.zeros(LENGTH, LENGTH).masked_fill(~ALLOWED, -math.inf)

# masks under which rows 0 and 3, or the padding at the left, see no key at all
MASKS = {
    "bool": {"attn_mask": ALLOWED},
    "bool per sample": {"attn_mask": ALLOWED.expand(2, 1, LENGTH, LENGTH)},
    "additive": {"attn_mask": BIAS},
    "additive per head": {"attn_mask": BIAS.expand(2, 3, LENGTH, LENGTH)},
    "bool and causal": {"attn_mask": ALLOWED, "is_causal": True},
    "left padding, causal": {
        "attn_mask": torch.tensor([[[[0, 0, 1, 1, 1, 1]]], [[[0, 1, 1, 1, 1, 1]]]]).bool(),
        "is_causal": True,
    },
    "everything": {"attn_mask": torch.zeros(LENGTH, LENGTH, dtype=torch.bool)},
    "everything, additive": {"attn_mask": torch.full((1, LENGTH), -math.inf)},
}


def empty_rows(options: dict) -> torch.Tensor:
    mask = options["attn_mask"]
    allowed = mask if mask.dtype == torch.bool else mask > -math.inf
    allowed = allowed.expand(2, 3, LENGTH, LENGTH)
    if options.get("is_causal"):
        allowed = allowed & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return ~allowed.any(-1)


def arguments(dtype: torch.dtype = torch.float64, degree: int = 3) -> list[torch.Tensor]:
    inputs = [tokens(2, 3, LENGTH, 4, dtype=dtype).requires_grad_() for _ in range(3)]
    return [*inputs, torch.randn(3, degree + 1, dtype=torch.float64, requires_grad=True)]


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_give_the_identitys_term_alone(backend: str, options: dict, dtype: torch.dtype) -> None:
    q, k, v, coeffs = arguments(dtype)
    y = graph_filter_attention(q, k, v, coeffs, **options, backend=backend)
    empty = empty_rows(options)
    assert empty.any()
    identity_term = (coeffs[:, :1, None] * v.double()).to(dtype)
    torch.testing.assert_close(y[empty], identity_term[empty])
    y.backward(torch.randn_like(y))
    assert y.isfinite().all()
    for x in (q, k, v, coeffs):
        assert x.grad is not None
        assert x.grad.isfinite().all()
    # what such a row asks for moves nothing
    assert not q.grad[empty].any()


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batched", [True, False], ids=["4-D", "3-D"])
def test_leave_the_other_rows_as_they_are(backend: str, options: dict, batched: bool) -> None:
    """4-D inputs and 3-D inputs reach different kernels of torch's."""
    q, k, v, coeffs = (x.detach() for x in arguments())
    if not batched:
        q, k, v = q[0], k[0], v[0]
        mask = options["attn_mask"]
        options = {**options, "attn_mask": mask[0] if mask.dim() == 4 else mask}
    y = graph_filter_attention(q, k, v, coeffs, **options, backend=backend)
    assert relative_error(y, reference_attention(q, k, v, coeffs, **options)) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_a_learned_bias_stays_finite(backend: str) -> None:
    q, k, v, coeffs = arguments()
    bias = BIAS.double().requires_grad_()
    graph_filter_attention(q, k, v, coeffs, bias, backend=backend).square().sum().backward()
    assert bias.grad is not None
    assert bias.grad.isfinite().all()
    assert bias.grad[~EMPTY].any()
    assert not bias.grad[EMPTY].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masked_keys_never_leak(backend: str, kind: str) -> None:
    """What stands in a column that nobody may see changes no other row, not even by a bit."""
    q, k, v, coeffs = (x.detach() for x in arguments())
    hidden = 2
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask[:, hidden] = False
    if kind == "additive":
        mask = torch.zeros(LENGTH, LENGTH).double().masked_fill(~mask, -math.inf)
    before = graph_filter_attention(q, k, v, coeffs, mask, backend=backend)
    for x in (q, k, v):
        x[..., hidden, :] = 1e3
    after = graph_filter_attention(q, k, v, coeffs, mask, backend=backend)
    seen = torch.arange(LENGTH) != hidden
    assert torch.equal(before[..., seen, :], after[..., seen, :])
    assert not torch.equal(before[..., hidden, :], after[..., hidden, :])
