"""The tracer refuses attention to the tokens of another sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gfsa
from gfsa.plugs.tracing.adapter import TraceError
from support.written_attention import DIM, TwoInputs, X


class Reader(nn.Module):
    """Attention that is given the tokens it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 1
        self.to_q, self.to_k = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        return (self.to_q(x) @ self.to_k(context).mT).softmax(-1) @ context


def test_tokens_of_another_sequence_are_refused():
    reader = Reader()
    gfsa.plug(reader, unknown="trace")
    assert reader(X).shape == X.shape
    assert reader(X, X).shape == X.shape
    assert reader(X, X.clone()).shape == X.shape
    with pytest.raises(ValueError, match="has other values than its query"):
        reader(X, X + 1)
    with pytest.raises(ValueError, match="has other values than its query"):
        reader(X, context=X + 1)
    fresh = Reader()
    gfsa.plug(fresh, unknown="trace")
    with pytest.raises(TraceError, match="its queries come from x and its keys from context"):
        fresh(X, X + 1)


CROSSING = [way for way in vars(TwoInputs) if way.startswith("cross")]


@pytest.mark.parametrize("way", CROSSING)
def test_attention_to_another_sequence_of_the_same_length_is_refused(way):
    module = TwoInputs()
    module.way = way
    other = X.flip(1)
    gfsa.plug(module, unknown="trace")
    for _ in range(2):
        with pytest.raises(TraceError, match=r"cannot filter.*(x|y).*(cross-attention|tokens)"):
            module(X, other)


def test_another_sequence_is_refused_after_one_that_was_the_same():
    module = TwoInputs()
    gfsa.plug(module, unknown="trace")
    module(X, X)
    module(X, X.clone())
    with pytest.raises(ValueError, match="its key has other values than its query"):
        module(X, X + 1)


@pytest.mark.parametrize("way", ["other_values_only", "positions", "positions_in_values", "unused"])
def test_a_second_input_that_is_no_other_sequence_is_accepted(way):
    module = TwoInputs()
    module.way = way
    y = X.flip(0)
    expected = module(X, y)
    gfsa.plug(module, unknown="trace")
    for _ in range(2):
        assert torch.equal(module(X, y), expected)


def test_places_that_are_cross_attention_are_left_alone():
    model = nn.ModuleDict({"attn1": Reader(), "attn2": Reader(), "cross_attn": Reader()})
    report = gfsa.plug(model, unknown="trace")
    assert list(report.plugged) == ["attn1"]
    assert all("cross-attention" in why for why in report.skipped.values())


class NextTokens(Reader):
    """Its keys and values are the tokens that follow its queries."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.to_q(x[:, :-1]) @ self.to_k(x[:, 1:]).mT).softmax(-1) @ x[:, 1:]


class FirstAndLast(Reader):
    def forward(self, x: Tensor) -> Tensor:
        first, last = x[:, 0, None], x[:, -1, None]
        return (self.to_q(first) @ self.to_k(last).mT).softmax(-1) @ last


@pytest.mark.parametrize("tokens", [2, 3])
@pytest.mark.parametrize("kind", [NextTokens, FirstAndLast])
def test_keys_of_other_tokens_are_refused_in_a_map_of_one_token_too(kind, tokens):
    module = kind()
    gfsa.plug(module, unknown="trace")
    for _ in range(2):
        with pytest.raises(TraceError, match="cannot filter"):
            module(X[:, :tokens])
