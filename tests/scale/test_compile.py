"""torch.compile: no graph breaks, and no new graph for a new batch size or length."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import gfsa
from gfsa.adapters.transformers import adapter as plugged_transformers
from gfsa.filters import PartialPolynomial
from gfsa.operators import AttentionOperator
from support.measuring import Counting
from support.subjects import DIM, HEADS, SUBJECTS, first

SIZES = [(2, 6), (3, 9), (7, 31)]
FILTERS = {
    "GFSA": lambda: gfsa.GFSA(HEADS, wK=0.2),
    "GFSA exact": lambda: gfsa.GFSA(HEADS, K=4, wK=0.2, power="exact"),
    "PartialPolynomial": lambda: PartialPolynomial(HEADS, degree=2, high=[0, 2]),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    "name",
    ["op", "GPT-2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("BERT", "ViT"))],
)
@torch.no_grad()
def test_one_graph_for_all_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a process that plugs for the first time, where nothing has been registered yet.

    Gradients of compiled models are compared in tests/plugs/test_training.py.
    """
    assert set(plugged_transformers._NAMES) >= {"sdpa", "eager"}
    monkeypatch.setattr(plugged_transformers, "_NAMES", {})
    subject = SUBJECTS[name]
    model, counting = subject.plugged(), Counting()
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    compiled(**subject.inputs(*SIZES[0]))
    for batch, length in SIZES:
        inputs = subject.inputs(batch, length)
        torch.testing.assert_close(
            first(compiled(**inputs)), first(model(**inputs)), rtol=0, atol=1e-6
        )
    # one for the first size, one for all the others
    assert counting.graphs == 2


@pytest.mark.parametrize("kind", FILTERS)
@torch.no_grad()
def test_every_filter_at_every_size(kind: str) -> None:
    made, counting = FILTERS[kind](), Counting()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return made(AttentionOperator(q, k, is_causal=True), v)

    compiled = torch.compile(call, fullgraph=True, backend=counting)
    for batch, length in SIZES:
        q, k, v = torch.randn(3, batch, HEADS, length, DIM).unbind()
        assert torch.equal(compiled(q, k, v), call(q, k, v))
    assert counting.graphs == 2


@torch.no_grad()
def test_the_linear_operator_at_every_size() -> None:
    coeffs, counting = torch.randn(HEADS, 3), Counting()
    compiled = torch.compile(
        gfsa.linear_graph_filter_attention, fullgraph=True, backend=counting, dynamic=True
    )
    for batch, length in SIZES:
        q, k, v = torch.randn(3, batch, HEADS, length, DIM).unbind()
        expected = gfsa.linear_graph_filter_attention(q, k, v, coeffs)
        assert torch.equal(compiled(q, k, v, coeffs), expected)
    assert counting.graphs == 1
