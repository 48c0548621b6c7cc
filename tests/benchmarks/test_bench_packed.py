"""The suite packed: its documents, its causal rows of equal work, and what its variants compute."""

from __future__ import annotations

import pytest
import torch

from gfsa.operators import AttentionCall, AttentionOperator, DenseOperator, Visibility
from gfsa_benchmarks import packed
from gfsa_benchmarks.case import Setting, Shape
from support.packed_cases import packed as visible_in

CPU = Setting(torch.device("cpu"), torch.float32)


def test_causal_rows_of_equal_work() -> None:
    """As the default shapes have them: within three per cent, and not more."""
    documents = [packed.document_lengths(8192, row) for row in range(4)]
    assert all(sum(row) == 8192 for row in documents)
    assert len({tuple(row) for row in documents}) == 4
    batch, length = packed.equal_rows(documents)
    assert batch * length == pytest.approx(4 * 8192, rel=0.01)
    work = packed.visible_pairs([length for row in documents for length in row])
    assert 0.97 * work <= packed.visible_pairs([length] * batch) <= work


def test_visible_pairs_are_what_queries_see() -> None:
    visible = Visibility.packed(torch.tensor([0, 3, 4, 9]), 9)
    assert packed.visible_pairs([3, 1, 5]) == visible.rows(0, 9, 9, CPU.device).sum()


def test_packed_rows_and_documents_alone_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # the same tokens for each variant
    randn = torch.Generator().manual_seed(3)
    tokens = [torch.randn(2, 1, 96, 4, generator=randn) for _ in range(3)]
    coeffs = torch.tensor([[0.1, 0.8, 0.1]])

    def same_tokens(*_: object, degree: int = 2) -> list[torch.Tensor]:
        return [*tokens, coeffs[:, : degree + 1]]

    monkeypatch.setattr(packed, "_tokens", same_tokens)
    case = packed.packed(Shape(2, 1, 96, 4), CPU)
    by_name = {v.name: v for v in case.variants}
    assert [*by_name][2:5] == ["gfsa", "gfsa sdpa", "gfsa by document"]
    together, sdpa, alone = (v.forward() for v in case.variants[2:5])
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(sdpa, alone)
    q, k, v = tokens
    visible = visible_in(*(packed.document_lengths(96, row) for row in range(2)))
    operator = DenseOperator.from_call(AttentionCall(q, k, visible=visible))
    once = operator.polynomial(coeffs[:, :2], v)
    torch.testing.assert_close(by_name["gfsa degree 1"].forward(), once)
    causal = AttentionOperator(q, k, is_causal=True).polynomial(coeffs[:, :2], v)
    torch.testing.assert_close(by_name["gfsa degree 1 causal rows"].forward(), causal)
    other = AttentionOperator(q, k, is_causal=True).polynomial(torch.tensor([[0.1, 0.8, 0.1]]), v)
    assert not torch.allclose(alone, other)
