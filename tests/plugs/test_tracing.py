"""The tracer: the attention it filters, and the attention it refuses."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import gfsa
from gfsa.plugs.tracing.adapter import TraceError
from support.plugging import check_backbone
from support.written_attention import (
    DIM,
    FOLLOWED,
    HEADS,
    B,
    Block,
    N,
    X,
    run,
)

# the reference of check_backbone expects heads after samples, and as many keys as queries; these
# are compared head by head, some of them in test_tracing_sizes.py
COMPARED_BY_HEAD = {w for w in FOLLOWED if "mixed" in w or "before" in w or "groups" in w}


@pytest.mark.parametrize("way", [w for w in FOLLOWED if w not in COMPARED_BY_HEAD])
def test_followed(way, tmp_path):
    # torch has another kernel for inputs without a head axis, which the filter's operator gives
    identity = 1e-6 if way == "sdpa_merged" else 0.0
    report = check_backbone(lambda: Block(way), run, tmp_path, identity, unknown="trace")
    assert report.how == {"attn": "tracer"}


def test_mixed_heads_are_followed_and_their_rows_reported():
    model = Block("mixed_heads").double().eval()
    plain = model(X.double())
    gfsa.plug(model, unknown="trace", filter=gfsa.Twicing)
    with pytest.warns(UserWarning, match="rows of the attention map of attn do not sum to one"):
        got = model(X.double())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(X.double()), got), "said once"
    assert not torch.allclose(got, plain)
    # by definition: 2A − A² of the mixed map
    attn = model.attn
    q, k, v = attn.qkv(X.double()).reshape(B, N, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = (q @ k.mT * DIM**-0.5).softmax(-1)
    mixed = torch.einsum("bhij,gh->bgij", mixed, attn.mix)
    y = (2 * mixed - mixed @ mixed) @ v
    expected = X.double() + attn.proj(y.transpose(1, 2).reshape(B, N, DIM))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


REFUSED = [
    ("two_products", "more than one attention product"),
    ("channels", r"4×4 over channels, not tokens"),
    ("linear_attention", "7×4, not square"),
    ("hand", "no product of a softmax with values"),
    ("fewer_keys", "7×6, not square"),
    ("reordered_queries", "the same tokens in another order"),
    ("reordered_keys", "the same tokens in another order"),
    ("sorted_queries", "the same tokens in another order"),
    ("rolled_values", "its values are other tokens than its keys, or the same tokens in ano"),
    ("the_next_sample", "the same tokens in another order"),
    ("half_and_half", "its queries and keys are different parts of x"),
    ("shifted_keys", "the same tokens in another order"),
    ("padded_keys", "the same tokens in another order"),
    ("written_keys", "the same tokens in another order"),
    ("the_same_map_twice", "more than one attention product"),
    ("values_of_distances", "a product takes a part or a sum of its map"),
    ("sink", "a product takes a part or a sum of its map"),
    ("another_product", "queries.*could not be followed .*not understood is tensordot"),
    ("unbatched_heads", r"shape \(3, 2, 2, 7, 7\), with no axis for its 4 heads"),
    ("einsum_with_dots", "einsum that is not understood"),
]


@pytest.mark.parametrize(("way", "why"), REFUSED)
def test_refused(way, why):
    model = nn.Sequential(Block(way))
    expected = run(model)
    gfsa.plug(model, unknown="trace")
    with pytest.raises(TraceError, match=rf"cannot filter 0\.attn.*{why}.*register_adapter"):
        run(model)
    gfsa.unplug(model)
    assert torch.equal(run(model), expected)


@pytest.mark.parametrize("place", ["attention", "filter"])
def test_dropout(place):
    model = Block("matmul")
    gfsa.plug(model, unknown="trace", wK=0.3, dropout_after=place)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # dropped rows do not sum to one, the map's do
        assert not torch.equal(model(X), model(X))
    model.eval()
    assert torch.equal(model(X), model(X))


def test_an_einsum_with_values_that_heads_share() -> None:
    class OneHeadOfValues(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 2
            self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 8)

        def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
            k, v = self.kv(x).chunk(2, -1)
            q = self.q(x).unflatten(-1, (2, 4))
            return torch.einsum("bihd,bjd->bhij", q, k).softmax(-1), v

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bhij,bjd->bihd", *self.parts(x)).flatten(2)

    module, x = OneHeadOfValues().double(), torch.randn(3, 5, 8, dtype=torch.float64)
    gfsa.plug(module, unknown="trace")
    nn.init.normal_(module.gfsa.theta)
    matrix, v = module.parts(x)
    filtered = module.gfsa.map(gfsa.operators.DenseOperator(matrix))
    expected = torch.einsum("bhij,bjd->bihd", filtered, v).flatten(2)
    torch.testing.assert_close(module(x), expected)
