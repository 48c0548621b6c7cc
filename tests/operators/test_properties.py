"""Properties of filtered attention: rows without keys, values that are not finite, symmetries."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from gfsa import graph_filter_attention, linear_graph_filter_attention
from gfsa.filters import PartialPolynomial
from gfsa.operators import AttentionOperator, DenseOperator, Visibility
from support.attention import BACKENDS, reference_attention, relative_error, tokens

degrees = st.integers(0, 4)
seeds = st.integers(0, 2**16)
backends = st.sampled_from(BACKENDS)


def draw_inputs(seed: int, degree: int, length: int = 7) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    inputs = [tokens(2, 3, length, 4) for _ in range(3)]
    return [*inputs, torch.randn(3, degree + 1, dtype=torch.float64)]


@given(seeds, degrees, backends, st.booleans())
def test_constant_tokens_are_scaled_by_the_sum_of_the_coefficients(
    seed: int, degree: int, backend: str, is_causal: bool
) -> None:
    """The rows of A sum to one, so the rows of H sum to Σ c_k."""
    q, k, v, coeffs = draw_inputs(seed, degree)
    constant = v[..., :1, :].expand_as(v)
    expected = coeffs.sum(-1)[:, None, None] * constant
    y = graph_filter_attention(q, k, constant, coeffs, is_causal=is_causal, backend=backend)
    assert relative_error(y, expected) <= 1e-12
    assert relative_error(linear_graph_filter_attention(q, k, constant, coeffs), expected) <= 1e-12


@given(seeds, degrees, backends, st.integers(1, 6))
def test_the_future_never_leaks(seed: int, degree: int, backend: str, now: int) -> None:
    """Powers of a causal map are causal: no later token changes an earlier one, by no bit."""
    q, k, v, coeffs = draw_inputs(seed, degree)
    before = graph_filter_attention(q, k, v, coeffs, is_causal=True, backend=backend)
    for x in (q, k, v):
        x[..., now:, :] += 1 + torch.rand_like(x[..., now:, :])
    after = graph_filter_attention(q, k, v, coeffs, is_causal=True, backend=backend)
    assert torch.equal(before[..., :now, :], after[..., :now, :])
    assert not torch.equal(before[..., now:, :], after[..., now:, :])


@given(seeds, degrees, backends)
def test_tokens_in_another_order_give_the_same_in_that_order(
    seed: int, degree: int, backend: str
) -> None:
    q, k, v, coeffs = draw_inputs(seed, degree)
    order = torch.randperm(7)
    shuffled = [x[..., order, :] for x in (q, k, v)]
    for attend in (partial(graph_filter_attention, backend=backend), linear_graph_filter_attention):
        y, moved = attend(q, k, v, coeffs), attend(*shuffled, coeffs)
        assert relative_error(moved, y[..., order, :]) <= 1e-12


@given(seeds, degrees, backends, st.integers(0, 4), st.sampled_from(["left", "right"]))
def test_padding_changes_nothing(
    seed: int, degree: int, backend: str, pads: int, side: str
) -> None:
    q, k, v, coeffs = draw_inputs(seed, degree)
    y = graph_filter_attention(q, k, v, coeffs, backend=backend)
    before, after = (pads, 0) if side == "left" else (0, pads)
    keep = F.pad(torch.ones(7, dtype=torch.bool), (before, after))
    padded = [F.pad(x, (0, 0, before, after), value=10 * torch.randn(()).item()) for x in (q, k, v)]
    z = graph_filter_attention(*padded, coeffs, keep[None, None, None, :], backend=backend)
    assert relative_error(z[..., keep, :], y) <= 1e-12


@settings(max_examples=50)
@given(seeds, backends)
def test_linear_in_values_and_in_coefficients(seed: int, backend: str) -> None:
    q, k, v, coeffs = draw_inputs(seed, 3)
    w, others = torch.randn_like(v), torch.randn_like(coeffs)

    def attend(values: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return graph_filter_attention(q, k, values, numbers, backend=backend)

    y = attend(v, coeffs)
    assert relative_error(attend(v + 2 * w, coeffs), y + 2 * attend(w, coeffs)) <= 1e-12
    assert relative_error(attend(v, coeffs + 2 * others), y + 2 * attend(v, others)) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend: str) -> None:
    q, k, v, coeffs = (x.float().requires_grad_() for x in draw_inputs(0, 2))
    y = graph_filter_attention(q * 1e4, k * 1e4, v, coeffs, backend=backend)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(math.isfinite(x.grad.abs().sum()) for x in (q, k, v, coeffs))


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
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v, coeffs))
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


TOKENS, BORDER = 12, 7
DOCUMENT = torch.arange(TOKENS) >= BORDER
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
PACKED = (DOCUMENT[:, None] == DOCUMENT) & CAUSAL


def problem(bad: float, head: int | slice, row: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, TOKENS, 4).unbind()
    v[0, head, row] = bad
    return q, k, v, torch.randn(3, 3)


def spoilt(y: Tensor) -> Tensor:
    return ~y.isfinite().all(-1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": PACKED}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_other_sequence_and_no_other_head(backend: str, options: dict, bad: float) -> None:
    q, k, v, coeffs = problem(bad, 1, 3)
    found = spoilt(graph_filter_attention(q, k, v, coeffs, **options, backend=backend))
    assert found[0, 1, 3:BORDER].all()
    found[0, 1] = False
    assert not found.any()


@pytest.mark.parametrize("row", [2, BORDER, TOKENS - 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_in_one_row_as_in_plain_attention(backend: str, bad: float, row: int) -> None:
    """Torch multiplies what a query does not see by zero; a filter adds nothing to that."""
    q, k, v, coeffs = problem(bad, slice(None), row)
    plain = spoilt(F.scaled_dot_product_attention(q, k, v, attn_mask=PACKED))
    visible = Visibility.packed(torch.tensor([0, BORDER, TOKENS]), TOKENS)
    operator = AttentionOperator(q, k, backend=backend, visible=visible)
    assert not (spoilt(operator.polynomial(coeffs, v)) & ~plain).any()


def test_sequences_of_a_nested_tensor_are_apart() -> None:
    offsets, tokens = torch.tensor([0, 3, 8, 10]), torch.randn(2, 10, 2, 4)
    tokens[1, 5] = math.nan
    q, v = (torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in tokens)
    y = graph_filter_attention(q, q, v, torch.tensor([0.5, 0.3, 0.2]))
    assert [bool(spoilt(part).any()) for part in y.unbind()] == [False, True, False]


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_a_map_with_rows_of_nan_spoils_these_alone(dropout_p: float) -> None:
    """As a model's softmax has them for queries that see nothing, here the padding at the left."""
    seen = CAUSAL & (torch.arange(TOKENS) >= 4)
    torch.manual_seed(0)
    scores = torch.randn(3, TOKENS, TOKENS).masked_fill(~seen, -math.inf)
    matrix, v = scores.softmax(-1), torch.randn(3, TOKENS, 4)
    assert matrix[:, :4].isnan().all()
    operator = DenseOperator(matrix, dropout_p, "filter")
    coeffs = torch.randn(3, 4)
    y = operator.polynomial(coeffs, v)
    assert torch.equal(spoilt(y), matrix[..., 0].isnan())
    if dropout_p == 0:
        wanted = DenseOperator(matrix.nan_to_num()).polynomial(coeffs, v)
        torch.testing.assert_close(y[:, 4:], wanted[:, 4:])
    # the same for powers of some heads
    some = PartialPolynomial(3, 3, high=[0, 2])
    torch.nn.init.normal_(some.theta)
    assert torch.equal(spoilt(some(operator, v)), matrix[..., 0].isnan())


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient_comes_from_the_future(backend: str) -> None:
    *inputs, coeffs = draw_inputs(0, 3)
    q, k, v = (x.requires_grad_() for x in inputs)
    y = graph_filter_attention(q, k, v, coeffs, is_causal=True, backend=backend)
    for gradient in torch.autograd.grad(y[..., :3, :].square().sum(), (q, k, v)):
        assert gradient[..., :3, :].any()
        assert not gradient[..., 3:, :].any()
