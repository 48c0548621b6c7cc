"""Visibility: which keys a query sees, from any kind of mask, against the attention map itself."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gfsa.operators import (
    AttentionCall,
    AttentionOperator,
    DenseOperator,
    FunctionOperator,
    LinearOperator,
    Operator,
    SDPAOperator,
    Visibility,
)
from gfsa.operators.visibility import refusal_of_spans
from gfsa_experiments.baselines.methods import mean_matrix, mean_of_visible

B, H, N, D = 2, 3, 6, 4


def additive(mask: Tensor, lowest: float) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, lowest)


def masks() -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    # every query sees itself, so that no row is empty
    pairs = (torch.rand(B, H, N, N) < 0.5) | torch.eye(N, dtype=torch.bool)
    keys = torch.ones(B, 1, 1, N, dtype=torch.bool)
    keys[1, ..., 4:] = False
    return {
        "none": None,
        "keys": keys,
        "keys, additive": additive(keys, -math.inf),
        "keys of all sequences": keys[1, 0, 0],
        "pairs": pairs[:1, :1],
        "pairs per head": pairs,
        "pairs per head, all sequences": pairs[0],
        "pairs, smallest number": additive(pairs, torch.finfo(torch.float32).min),
        "queries and keys": pairs[0, 0],
    }


@pytest.fixture
def qk() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, H, N, D), torch.randn(B, H, N, D)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("kind", ["attention", "sdpa"])
def test_an_operator_sees_where_its_map_is_not_zero(
    name: str, causal: bool, kind: str, qk: tuple[Tensor, Tensor]
) -> None:
    q, k = qk
    call = AttentionCall(q, k, masks()[name], is_causal=causal)
    seen = DenseOperator.from_call(call).matrix > 0
    operator: Operator = SDPAOperator(call)
    if kind == "attention":
        operator = AttentionOperator(q, k, call.attn_mask, is_causal=causal)
    visible = operator.visibility()
    rows = [visible.rows(i, i + 2, N, q.device).expand(B, H, 2, N) for i in range(0, N, 2)]
    assert torch.equal(torch.cat(rows, -2), seen)
    weights = mean_matrix(visible, N, q).expand(B, H, N, N)
    torch.testing.assert_close(weights, seen / seen.sum(-1, keepdim=True))
    mean = mean_of_visible(visible, k, N)
    torch.testing.assert_close(mean.expand(B, H, N, D), weights @ k)
    keys = visible.visible_keys()
    expected = seen.any(-2).any(-2)
    assert torch.equal(torch.ones_like(expected) if keys is None else keys.expand(B, N), expected)


def test_padding_of_efficient_attention(qk: tuple[Tensor, Tensor]) -> None:
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1, 3:] = True
    visible = LinearOperator(*qk, padding).visibility()
    assert torch.equal(visible.visible_keys(), ~padding)
    assert LinearOperator(*qk).visibility() == Visibility()
    # a matrix and a function tell nothing
    assert DenseOperator(torch.eye(3)).visibility() is None
    assert FunctionOperator(lambda x: x).visibility() is None


def documents(*rows: list[int]) -> Tensor:
    """``(B, 1, N)`` from the lengths of the documents of each row."""
    numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]
    return torch.stack(numbers)[:, None]


@pytest.mark.parametrize("window", [None, 1, 4, 2**40])
@pytest.mark.parametrize(
    "packed",
    [None, documents([12]), documents([1, 5, 6], [12], [3, 3, 3, 3]), documents([1] * 12)[0]],
    ids=["none", "one", "rows", "of one token"],
)
def test_spans_say_what_is_visible(window: int | None, packed: Tensor | None) -> None:
    visible = Visibility(causal=True, window=window, documents=packed, in_order=True)
    assert refusal_of_spans(visible) is None
    spans = visible.spans(12, torch.device("cpu"))
    assert spans.dtype == torch.int32
    assert visible.spans(12, torch.device("cpu")) is spans
    first, last = spans.unbind(1)
    assert (spans.diff() >= 0).all()
    query, key = torch.arange(12)[:, None], torch.arange(12)
    expected = visible.rows(0, 12, 12, torch.device("cpu")).reshape(-1, 12, 12)
    assert torch.equal((first[:, :, None] <= key) & (key <= query), expected)
    assert torch.equal((query <= last[:, None]) & (key <= query), expected)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("numbers", [[5] * 6 + [0] * 6, [3, 3, 1, 1, 2, 2] * 2, [*range(12)][::-1]])
def test_spans_of_documents_out_of_order_contain_their_token(
    numbers: list[int], window: int | None
) -> None:
    """``in_order`` is the caller's word: kernels may give anything, but have to end."""
    packed = torch.tensor(numbers)
    visible = Visibility(causal=True, window=window, documents=packed, in_order=True)
    first, last = visible.spans(12, torch.device("cpu"))[0]
    token = torch.arange(12)
    assert ((first >= 0) & (first <= token) & (token <= last) & (last < 12)).all()


@pytest.mark.parametrize("what", ["spans", "whole"])
def test_nothing_of_a_captured_graph_is_kept(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory has no values before the first replay, and those of other documents after it."""
    device = torch.device("cuda")
    visible = Visibility(causal=True, documents=documents([5, 7]), in_order=True)
    # a machine without a GPU cannot compute there
    monkeypatch.setattr(Visibility, "_spans", lambda self, *_: torch.zeros(1))
    monkeypatch.setattr(Visibility, "rows", lambda self, *_: torch.zeros(1))
    compute = getattr(visible, what)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = compute(12, device)
    assert compute(12, device) is not captured
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    eager = compute(12, device)
    assert eager is not captured
    assert compute(12, device) is eager
    # a graph computes its own, from the documents that each replay has
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert compute(12, device) is not eager


def test_spans_do_not_say_everything() -> None:
    numbers = documents([6, 6])
    by_head = numbers.expand(1, 2, 12)
    for visible, reason in (
        (Visibility(torch.ones(1, 1, 12).bool(), causal=True, window=3), "padding"),
        (Visibility(window=3), "later tokens"),
        (Visibility(causal=True, window=0), "not even itself"),
        (Visibility(causal=True, documents=numbers), "in_order"),
        (Visibility(causal=True, documents=by_head, in_order=True), "from head to head"),
    ):
        assert reason in (refusal_of_spans(visible) or "")


def test_documents_by_their_borders() -> None:
    visible = Visibility.packed(torch.tensor([0, 3, 4, 9], dtype=torch.int32), 12)
    alike = Visibility(causal=True, documents=documents([3, 1, 5, 3]), in_order=True)
    device = torch.device("cpu")
    assert torch.equal(visible.spans(12, device), alike.spans(12, device))
    assert torch.equal(visible.rows(0, 12, 12, device), alike.rows(0, 12, 12, device)[0])


@pytest.mark.parametrize(
    ("visible", "part"),
    [
        (Visibility(causal=True, documents=documents([5, 7], [6, 6]), in_order=True), "documents"),
        (Visibility(causal=True, documents=documents([6, 18]), in_order=True), "documents"),
        (Visibility(keys=torch.ones(2, 1, 12, dtype=torch.bool)), "keys"),
    ],
    ids=["other rows", "other tokens", "other keys"],
)
def test_it_fits_the_tokens(visible: Visibility, part: str) -> None:
    """Kernels would read beyond the end of it."""
    x = torch.randn(3, 2, 12, 8)
    with pytest.raises(ValueError, match=rf"visible\.{part} .* does not fit .* \(3, 2, 12\)"):
        AttentionOperator(x, x, visible=visible).polynomial(torch.ones(3), x)


def test_it_is_where_the_tokens_are() -> None:
    """A kernel on a GPU would read the address of a tensor of the host."""
    x = torch.empty(1, 2, 12, 8, device="meta")
    visible = Visibility.packed(torch.tensor([0, 5]), 12)
    with pytest.raises(ValueError, match="q is on meta, documents on cpu; move one"):
        AttentionOperator(x, x, visible=visible).polynomial(torch.ones(3, device="meta"), x)
    keys = torch.ones(1, 1, 1, 12, dtype=torch.bool)
    with pytest.raises(ValueError, match="q is on meta, attn_mask on cpu"):
        AttentionOperator(x, x, keys).polynomial(torch.ones(3, device="meta"), x)
    elsewhere = Visibility(causal=True, documents=visible.documents.to("meta"), in_order=True)
    assert elsewhere.signature() != visible.signature()


def test_parts_of_it_keep_their_order() -> None:
    visible = Visibility(causal=True, documents=documents([3, 9]), in_order=True)
    assert visible.of_heads([1]).in_order
    assert Visibility(causal=True).signature() != Visibility(causal=True, in_order=True).signature()


@pytest.fixture(params=[False, True], ids=["", "inference mode"])
def inference(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.inference_mode(request.param):
        yield


@pytest.mark.usefixtures("inference")
def test_documents_that_change_in_place_are_read_again() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    visible = Visibility(causal=True, documents=documents, in_order=True)
    q, k, v = torch.randn(3, 1, 2, N, D).unbind()
    for border in (3, 2, 5):
        documents.copy_(torch.arange(N) >= border)
        fresh = Visibility(causal=True, documents=documents.clone(), in_order=True)
        assert torch.equal(visible.spans(N, q.device), fresh.spans(N, q.device))
        found, expected = (
            AttentionOperator(q, k, backend="sdpa", visible=each).apply(v)
            for each in (visible, fresh)
        )
        assert torch.equal(found, expected)
    if not documents.is_inference():
        assert visible.whole(N, q.device) is visible.whole(N, q.device)


def test_what_is_written_in_inference_mode_is_not_used_outside_of_it() -> None:
    """Kernels that save a mask for their gradient refuse one that was made there."""
    visible = Visibility.packed(torch.tensor([0, 3, N]), N)
    for written in (visible.whole, visible.spans):
        with torch.inference_mode():
            inside = written(N, torch.device("cpu"))
        outside = written(N, torch.device("cpu"))
        assert inside.is_inference()
        assert not outside.is_inference()
        assert torch.equal(inside, outside)
