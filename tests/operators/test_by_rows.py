"""Described visibility: the same map as the dense operator's, and no tensor of N×N entries."""

import pytest
import torch
from torch import Tensor

from gfsa.operators import (
    AttentionCall,
    AttentionOperator,
    DenseOperator,
    SDPAOperator,
    Visibility,
    blocked,
)
from support.measuring import LargestTensor

B, H, N, D = 3, 4, 23, 8
COEFFS = torch.tensor([0.3, 0.9, -0.4], dtype=torch.float64)


def keys() -> Tensor:
    """Padding on the right, on the left, and none, ``(B, 1, N)``."""
    visible = torch.ones(B, 1, N, dtype=torch.bool)
    visible[0, :, 15:] = False
    visible[1, :, :9] = False
    return visible


def documents() -> Tensor:
    places = torch.arange(N)
    return torch.stack([places // 7, places // 23, (places > 3).long() + (places > 4)])[:, None]


CASES = {
    "padding": Visibility(keys()),
    "causal": Visibility(causal=True),
    "causal padding": Visibility(keys(), causal=True),
    "window": Visibility(window=4),
    "causal window": Visibility(causal=True, window=4),
    "causal window of one token": Visibility(causal=True, window=1),
    "causal padded window": Visibility(keys(), causal=True, window=6),
    "documents": Visibility(documents=documents()),
    "causal documents": Visibility(causal=True, documents=documents()),
    "all": Visibility(keys(), causal=True, window=5, documents=documents()),
    "pairs": Visibility(pairs=torch.rand(B, 1, N, N) < 0.6),
}


def tokens(kv_heads: int = H) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    sizes = ((B, heads, N, D) for heads in (H, kv_heads, kv_heads))
    q, k, v = (torch.randn(size, dtype=torch.float64).requires_grad_() for size in sizes)
    return q, k, v


def formula(visible: Visibility) -> Tensor:
    """True where a query sees a key, entry by entry."""
    allowed = torch.ones(B, 1, N, N, dtype=torch.bool)
    for b in range(B):
        for i in range(N):
            for j in range(N):
                seen = visible.keys is None or bool(visible.keys[b, 0, j])
                seen &= not visible.causal or j <= i
                seen &= visible.window is None or abs(i - j) < visible.window
                own = visible.documents
                seen &= own is None or bool(own[b, 0, i] == own[b, 0, j])
                allowed[b, 0, i, j] = seen
    return allowed if visible.pairs is None else visible.pairs


@pytest.mark.parametrize("entries", [1, 200, 2**25])
@pytest.mark.parametrize("name", CASES)
def test_blocks_of_any_size_give_the_dense_map(
    name: str, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "MOST_ENTRIES", entries)
    visible = CASES[name]
    q, k, v = tokens()
    dense = DenseOperator.from_qk(q, k, formula(visible))
    expected = dense.polynomial(COEFFS, v)
    operator = AttentionOperator(q, k, visible=visible)
    y = operator.polynomial(COEFFS, v)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(operator.dense(), dense.matrix)
    torch.testing.assert_close(SDPAOperator(operator.call).apply(v), dense.apply(v))
    g = torch.randn_like(y)
    for got, wanted in zip(
        torch.autograd.grad(y, (q, k, v), g),
        torch.autograd.grad(expected, (q, k, v), g),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_grouped_heads_and_some_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "MOST_ENTRIES", 100)
    visible = CASES["all"]
    q, k, v = tokens(kv_heads=2)
    dense = DenseOperator.from_qk(q, k, formula(visible))
    operator = AttentionOperator(q, k, enable_gqa=True, visible=visible)
    torch.testing.assert_close(operator.polynomial(COEFFS, v), dense.polynomial(COEFFS, v))
    some = operator.second_pass([0, 3])
    assert some is not None
    x = torch.randn(B, 2, N, D, dtype=torch.float64)
    torch.testing.assert_close(some.apply(x), dense.matrix[:, [0, 3]] @ x)


def test_a_key_mask_with_causality_needs_no_square_mask() -> None:
    length = 2048
    q = torch.randn(1, 1, length, 8)
    mask = torch.ones(1, 1, 1, length, dtype=torch.bool)
    mask[..., :100] = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "MOST_ENTRIES", length * 64)
        with LargestTensor() as largest:
            y = AttentionOperator(q, q, mask, is_causal=True).polynomial(COEFFS.float(), q)
    # a mask in float32, which torch makes of a bool one, and nothing above
    assert largest.bytes <= 4 * 64 * length
    expected = DenseOperator.from_qk(q, q, mask, is_causal=True).polynomial(COEFFS.float(), q)
    torch.testing.assert_close(y, expected)


def test_gradients_keep_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "MOST_ENTRIES", 4 * N)
    q, k, v = tokens()
    saved: list[int] = []

    def note(x: Tensor) -> Tensor:
        saved.append(x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        SDPAOperator(AttentionCall(q, k, visible=CASES["causal padding"])).apply(v)
    assert saved
    assert max(saved) <= q.untyped_storage().nbytes()


def test_the_mask_of_a_short_sequence_is_written_once() -> None:
    visible = Visibility(keys(), causal=True)
    q, k, v = tokens()
    AttentionOperator(q, k, visible=visible).polynomial(COEFFS, v)
    mask = visible.whole(N, q.device)
    AttentionOperator(k, q, visible=visible).polynomial(COEFFS, v)
    assert visible.whole(N, q.device) is mask


def test_dropout_drops_the_same_entries_in_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "MOST_ENTRIES", 4 * N)
    q, k, _ = tokens()
    call = AttentionCall(q, k, dropout_p=0.4, visible=CASES["causal padding"])
    eye = torch.eye(N, dtype=torch.float64).expand(B, H, N, N)
    torch.manual_seed(1)
    _, once, twice = SDPAOperator(call).powers(eye, 2)
    torch.testing.assert_close(twice, once @ once)


def test_what_takes_its_place_is_refused() -> None:
    q, k, v = tokens()
    with pytest.raises(ValueError, match="visible takes the place of attn_mask"):
        AttentionOperator(q, k, is_causal=True, visible=CASES["window"]).polynomial(COEFFS, v)


def test_keys_and_causality_are_a_key_mask() -> None:
    q, k, _ = tokens()
    simple = AttentionCall(q, k, visible=CASES["causal padding"]).with_key_mask()
    assert simple.is_causal
    assert simple.visible is None
    assert simple.attn_mask is not None
    assert simple.attn_mask.shape == (B, 1, 1, N)
