"""NaN and infinity reach the rows that they reach in plain attention, and no others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa import graph_filter_attention
from gfsa.filters.partial import PartialPolynomial
from gfsa.operators import AttentionOperator, DenseOperator, Visibility
from support.attention import BACKENDS

LENGTH, BORDER = 12, 7
DOCUMENT = torch.arange(LENGTH) >= BORDER
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
PACKED = (DOCUMENT[:, None] == DOCUMENT) & CAUSAL


def problem(bad: float, head: int | slice, row: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, LENGTH, 4).unbind()
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


@pytest.mark.parametrize("row", [2, BORDER, LENGTH - 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_in_one_row_as_in_plain_attention(backend: str, bad: float, row: int) -> None:
    """Torch multiplies what a query does not see by zero; a filter adds nothing to that."""
    q, k, v, coeffs = problem(bad, slice(None), row)
    plain = spoilt(F.scaled_dot_product_attention(q, k, v, attn_mask=PACKED))
    visible = Visibility.packed(torch.tensor([0, BORDER, LENGTH]), LENGTH)
    operator = AttentionOperator(q, k, backend=backend, visible=visible)
    assert not (spoilt(operator.polynomial(coeffs, v)) & ~plain).any()


def test_sequences_of_a_nested_tensor_are_apart() -> None:
    offsets, tokens = torch.tensor([0, 3, 8, 10]), torch.randn(10, 2, 4)
    with_nan = tokens.clone()
    with_nan[5] = math.nan
    q, v = (
        torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2)
        for x in (tokens, with_nan)
    )
    y = graph_filter_attention(q, q, v, torch.tensor([0.5, 0.3, 0.2]))
    found = [bool(spoilt(part).any()) for part in y.unbind()]
    assert found == [False, True, False]


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_a_map_with_rows_of_nan_spoils_these_alone(dropout_p: float) -> None:
    """As a model's softmax has them for queries that see nothing, here the padding at the left."""
    seen = CAUSAL & (torch.arange(LENGTH) >= 4)
    torch.manual_seed(0)
    scores = torch.randn(3, LENGTH, LENGTH).masked_fill(~seen, -math.inf)
    matrix, v = scores.softmax(-1), torch.randn(3, LENGTH, 4)
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
