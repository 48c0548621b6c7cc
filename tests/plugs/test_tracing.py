"""The tracer: the attention it filters, and the attention it refuses."""

from __future__ import annotations

import copy
import warnings
from collections import Counter

import pytest
import timm
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

import gfsa
from gfsa.plugs.tracing.adapter import TraceError, looks_like_attention
from support.plugging import check_backbone, disturb, matrix_polynomial

B, N, DIM, HEADS = 3, 7, 16, 4


class WrittenAttention(nn.Module):
    """Self-attention whose product with v is written in one of many ways."""

    way = "matmul"

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.mix = nn.Parameter(torch.eye(HEADS) + 0.1)
        self.drop = nn.Dropout(0.5)
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = getattr(self, f"by_{self.way}")(q * DIM**-0.5, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, n, DIM))

    def by_matmul(self, q, k, v):
        return torch.matmul(self.drop((q @ k.mT).softmax(dim=-1)), v)

    def by_casts(self, q, k, v):
        attention = F.softmax(q @ k.mT, -1, dtype=torch.promote_types(v.dtype, torch.float32)).to(
            v.dtype
        )
        return attention.masked_fill(attention.isnan(), 0.0).contiguous() @ v

    def by_columns(self, q, k, v):
        return (v.mT @ torch.softmax(q @ k.mT, 3).mT).mT

    def by_einsum(self, q, k, v):
        attention = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", attention, v.transpose(1, 2)).transpose(1, 2)

    def by_mixed_heads(self, q, k, v):
        attention = torch.einsum("bhij,gh->bgij", (q @ k.mT).softmax(-1), self.mix)
        return attention @ v

    def by_merged_heads(self, q, k, v):
        q, k, v = (x.reshape(-1, x.shape[2], x.shape[3]) for x in (q, k, v))
        return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).view(-1, HEADS, *v.shape[1:])

    def by_sdpa(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=1.0, dropout_p=0.0)

    def by_sdpa_with_groups(self, q, k, v):
        return F.scaled_dot_product_attention(q, k[:, ::2], v[:, ::2], scale=1.0, enable_gqa=True)

    def by_sdpa_merged(self, q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=1.0).unflatten(0, (-1, HEADS))

    def by_head_axis_inside_windows(self, q, k, v):
        q, k, v = (x.unsqueeze(2) for x in (q, k, v))  # (B, H, windows, N, D)
        return ((q @ k.mT).softmax(-1) @ v).squeeze(2)

    def by_joined(self, q, k, v):
        q, k, v = (torch.cat([x[:, :, :1], x[:, :, 1:]], 2) for x in (q, k, v))
        return (q @ k.mT).softmax(-1) @ v

    def by_joined_and_merged(self, q, k, v):
        q, k, v = (torch.cat([x[:, :, :1], x[:, :, 1:]], 2) for x in (q, k, v))
        return self.by_merged_heads(q, k, v)

    def by_one_head_of_values(self, q, k, v):
        return (q @ k.mT).softmax(-1) @ v[:, :1]

    def by_product_into_a_tensor(self, q, k, v):
        attention = (q @ k.mT).softmax(-1)
        if torch.is_grad_enabled():
            return attention @ v
        y = torch.empty_like(v)
        torch.matmul(attention, v, out=y)
        return y

    def by_added_product(self, q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        attention = torch.baddbmm(torch.zeros_like(q @ k.mT), q, k.mT).softmax(-1)
        return torch.baddbmm(v, attention, v, beta=0.5, alpha=2.0).unflatten(0, (-1, HEADS))

    def by_names_of_arguments(self, q, k, v):
        d = k.shape[-1]
        merged = k.flatten(0, 1).mT
        k = F.conv1d(input=merged, weight=torch.ones(d, 1, 1).to(k), groups=d).mT.view_as(k)
        attention = F.softmax(input=torch.matmul(input=q, other=k.mT), dim=-1)
        return torch.matmul(input=attention, other=v)

    def by_softmax_module(self, q, k, v):
        return nn.Dropout(0.0)(nn.Softmax(dim=-1)(q @ k.mT)) @ v

    def by_the_same_index(self, q, k, v):
        order = torch.arange(q.shape[2]).flip(0)
        q, k, v = (x[:, :, order] for x in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v)[:, :, order]

    def by_written_bias(self, q, k, v):
        scores = q @ k.mT
        scores[:, :, 1:, 1:] = scores[:, :, 1:, 1:] + q[:, :, 1:, :1]
        scores[:, :, 0, 1] = -1.0
        return scores.softmax(-1) @ torch.empty_like(v).copy_(v)

    def by_windows(self, q, k, v):
        q, k, v = (F.pad(x, (0, 0, 0, 1)).unflatten(2, (2, -1)) for x in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).flatten(2, 3)[:, :, :N]

    def by_heads_before_samples(self, q, k, v):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).transpose(0, 1)

    def by_heads_before_samples_in_memory(self, q, k, v):
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).transpose(0, 1)

    def by_heads_before_samples_merged(self, q, k, v):
        q, k, v = (x.transpose(0, 1).reshape(-1, x.shape[2], x.shape[3]) for x in (q, k, v))
        y = torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)
        return y.view(HEADS, -1, *v.shape[1:]).transpose(0, 1)

    def by_sdpa_heads_before_samples(self, q, k, v):
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(0, 1)

    # from here on: what must be refused

    def by_two_products(self, q, k, v):
        attention = (q @ k.mT).softmax(-1)
        return F.scaled_dot_product_attention(q, k, attention @ v)

    def by_channels(self, q, k, v):
        return ((q.mT @ k).softmax(-1) @ v.mT).mT

    def by_linear_attention(self, q, k, v):
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)

    def by_hand(self, q, k, v):
        scores = (q @ k.mT).exp()
        return (scores / scores.sum(-1, keepdim=True)) @ v

    def by_fewer_keys(self, q, k, v):
        return (q @ k[:, :, 1:].mT).softmax(-1) @ v[:, :, 1:]

    def by_reordered_queries(self, q, k, v):
        return (q.flip(2) @ k.mT).softmax(-1) @ v

    def by_reordered_keys(self, q, k, v):
        order = torch.arange(q.shape[2]).flip(0)
        return (q @ k[:, :, order].mT).softmax(-1) @ v[:, :, order]

    def by_sorted_queries(self, q, k, v):
        top = q.norm(dim=-1).topk(q.shape[2]).indices
        chosen = q.gather(2, top[..., None].expand_as(q))
        return (chosen @ k.mT).softmax(-1) @ v

    def by_rolled_values(self, q, k, v):
        return (q @ k.mT).softmax(-1) @ v.roll(1, 2)

    def by_the_next_sample(self, q, k, v):
        return (q @ k.roll(1, 0).mT).softmax(-1) @ v.roll(1, 0)

    def by_half_and_half(self, q, k, v):
        (q, _), (_, k), (_, v) = (x[:, :, : N - 1].chunk(2, 2) for x in (q, k, v))
        return F.pad((q @ k.mT).softmax(-1) @ v, (0, 0, 0, N - q.shape[2]))

    def by_shifted_keys(self, q, k, v):
        keys = k.clone()
        keys[:, :, 1:] = k[:, :, :-1]
        return (q @ keys.mT).softmax(-1) @ v

    def by_written_keys(self, q, k, v):
        keys = torch.empty_like(k)
        keys[:, :, torch.arange(N).flip(0)] = k
        return (q @ keys.mT).softmax(-1) @ v

    def by_the_same_map_twice(self, q, k, v):
        attention = (q @ k.mT).softmax(-1)
        return attention @ v + attention @ v.square()

    def by_values_of_distances(self, q, k, v):
        attention = (q @ k.mT).softmax(-1)
        near = F.pad(attention, (0, 1))[..., :2]
        return attention @ v + near @ self.mix[:2]

    def by_sink(self, q, k, v):
        sink = torch.zeros_like(q[..., :1])
        return torch.cat([q @ k.mT, sink], -1).softmax(-1)[..., :-1] @ v

    def by_another_product(self, q, k, v):
        turned = torch.tensordot(torch.eye(N).flip(0).to(q), q, dims=([1], [2])).movedim(0, 2)
        return (turned @ k.mT).softmax(-1) @ v

    def by_unbatched_heads(self, q, k, v):
        q, k, v = (x.unflatten(1, (2, 2)) for x in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).flatten(1, 2)

    def by_einsum_with_dots(self, q, k, v):
        return torch.einsum("...ij,...jd->...id", (q @ k.mT).softmax(-1), v)


def written(way: str) -> WrittenAttention:
    module = WrittenAttention()
    module.way = way
    return module


WAYS = [
    name.removeprefix("by_")
    for name in vars(WrittenAttention)
    if name.startswith("by_")
]  # fmt: skip
FOLLOWED = WAYS[: WAYS.index("two_products")]
X = torch.randn(B, N, DIM, generator=torch.Generator().manual_seed(0))


def run(model: nn.Module) -> Tensor:
    return model(X.to(next(model.parameters()).dtype))


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.attn = written(way)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


# the reference of check_backbone expects heads after samples, and as many keys as queries
COMPARED_BELOW = {w for w in FOLLOWED if "mixed" in w or "before" in w or "groups" in w}


@pytest.mark.parametrize("way", [w for w in FOLLOWED if w not in COMPARED_BELOW])
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


@pytest.mark.parametrize(
    ("way", "why"),
    [
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
        ("written_keys", "the same tokens in another order"),
        ("the_same_map_twice", "more than one attention product"),
        ("values_of_distances", "a product takes a part or a sum of its map"),
        ("sink", "a product takes a part or a sum of its map"),
        ("another_product", "queries.*could not be followed .*not understood is tensordot"),
        ("unbatched_heads", r"shape \(3, 2, 2, 7, 7\), with no axis for its 4 heads"),
        ("einsum_with_dots", "einsum that is not understood"),
    ],
)
def test_refused(way, why):
    model = nn.Sequential(Block(way))
    expected = run(model)
    gfsa.plug(model, unknown="trace")
    with pytest.raises(TraceError, match=rf"cannot filter 0\.attn.*{why}.*register_adapter"):
        run(model)
    gfsa.unplug(model)
    assert torch.equal(run(model), expected)


def test_every_way_is_tested():
    tested = {way.removeprefix("by_") for way in dir(WrittenAttention) if way.startswith("by_")}
    assert tested == set(WAYS)


def traced(way: str) -> Block:
    model = Block(way).eval()
    gfsa.plug(model, unknown="trace", wK=0.2)
    return model


FEW = torch.randn(B, DIM // HEADS, DIM, generator=torch.Generator().manual_seed(1))
"""As many tokens as a head has features."""


def test_as_many_tokens_as_features_are_distinguished():
    for way in ("matmul", "merged_heads", "joined"):
        check_by_definition(way, FEW)
    with pytest.raises(TraceError, match="over channels, not tokens"):
        traced("channels")(FEW)


SIZES = [(1, N), (2, N), (HEADS, N), (N, N), (3, HEADS), (HEADS, HEADS), (5, 1)]
"""Samples and tokens; some are as many as the heads, or as each other."""


def check_by_definition(way: str, *batches: Tensor) -> None:
    """A traced module equals ``Σ c_k A^k v``, computed for each sample and head by itself."""
    model = Block(way).double().eval()
    plain = copy.deepcopy(model)
    gfsa.plug(model, unknown="trace")
    (coefficients,) = disturb(model)
    for x in batches:
        x = x.double()
        with torch.no_grad():
            expected = x + defined(plain.attn, x, coefficients)
            torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)


def defined(attention: WrittenAttention, x: Tensor, coefficients: Tensor) -> Tensor:
    samples = []
    for sample in x:
        qkv = attention.qkv(sample).unflatten(-1, (3, HEADS, -1))
        heads = []
        for head in range(HEADS):
            q, k, v = qkv[:, :, head].unbind(1)
            matrix = (q @ k.mT * DIM**-0.5).softmax(-1)
            powers = [torch.linalg.matrix_power(matrix, p) for p in range(coefficients.shape[1])]
            total = sum(c * power for c, power in zip(coefficients[head], powers, strict=True))
            heads.append(total @ v)
        samples.append(attention.proj(torch.cat(heads, -1)))
    return torch.stack(samples)


LAID_OUT = [
    "matmul",
    "casts",
    "columns",
    "einsum",
    "merged_heads",
    "sdpa",
    "sdpa_merged",
    "head_axis_inside_windows",
    "joined",
    "joined_and_merged",
    "softmax_module",
    "heads_before_samples",
    "heads_before_samples_merged",
    "heads_before_samples_in_memory",
    "sdpa_heads_before_samples",
]


@pytest.mark.parametrize("way", LAID_OUT)
def test_the_axis_of_the_heads_is_kept_whatever_the_sizes(way):
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(b, n, DIM, generator=generator) for b, n in SIZES]
    check_by_definition(way, *batches)
    check_by_definition(way, *reversed(batches))
    for batch in batches:
        check_by_definition(way, batch, X)


@torch.no_grad()
def test_grouped_queries():
    model = Block("sdpa_with_groups").double().eval()
    attention = copy.deepcopy(model.attn)
    gfsa.plug(model, unknown="trace")
    (coefficients,) = disturb(model)
    for x in (X.double(), torch.randn(HEADS, N, DIM, dtype=torch.float64)):
        q, k, v = attention.qkv(x).unflatten(-1, (3, HEADS, -1)).movedim((2, 3), (0, 2))
        k, v = (y[:, ::2].repeat_interleave(2, 1) for y in (k, v))
        matrix = (q @ k.mT * DIM**-0.5).softmax(-1)
        y = matrix_polynomial(coefficients, matrix) @ v
        expected = x + attention.proj(y.transpose(1, 2).flatten(2))
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)


def test_an_empty_batch():
    for way in ("matmul", "merged_heads", "sdpa"):
        model = traced(way)
        assert model(X[:0]).shape == (0, N, DIM)
        assert model(X).isfinite().all()
        assert model(X[:0]).shape == (0, N, DIM)


def test_another_path_through_the_forward_is_verified_too():
    class Branching(WrittenAttention):
        def by_matmul(self, q, k, v):
            return super().by_matmul(q.flip(2) if q.shape[2] < N else q, k, v)

    model = nn.Sequential(Branching()).eval()
    gfsa.plug(model, unknown="trace")
    for _ in range(2):
        model(X)
        with pytest.raises(TraceError, match="the same tokens in another order"):
            model(X[:, 1:])


class Remembers(WrittenAttention):
    """Counts its forwards in an object of the caller's and by batch norm, on one of two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x, calls=None):
        if calls is not None:
            calls["forward"] += 1
        x = self.norm(x.mT).mT
        return super().forward(x * 1.0 if len(x) > 2 else x)


def test_no_forward_that_changes_something_is_run_twice():
    attention, calls = Remembers(), Counter()
    model = nn.ModuleDict({"attention": attention})
    gfsa.plug(model, unknown="trace")
    for batch in (3, 2, 3, 1):
        # the second batch takes a new path
        attention(torch.randn(batch, N, DIM))
    assert attention.norm.num_batches_tracked == 4
    attention.eval()
    for batch in (3, 2, 5):
        attention(torch.randn(batch, N, DIM), calls)
    assert calls["forward"] == 3


def test_a_cache_has_the_keys_once_on_a_new_path():
    """MPT: forwards without a cache, then one with a cache, which takes a path of its own."""
    config = hf.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=64, expansion_ratio=2)
    torch.manual_seed(0)
    model = hf.MptForCausalLM(config).eval().double()
    gfsa.plug(model)
    disturb(model)
    ids = torch.randint(3, 64, (2, 9))
    with torch.no_grad():
        without = model(ids, use_cache=False)
        cached = model(ids, use_cache=True)
    assert cached.past_key_values.get_seq_length() == ids.shape[1]
    torch.testing.assert_close(cached.logits, without.logits)


@pytest.mark.parametrize("place", ["attention", "filter"])
def test_dropout(place):
    model = Block("matmul")
    gfsa.plug(model, unknown="trace", wK=0.3, dropout_after=place)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # dropped rows do not sum to one, the map's do
        assert not torch.equal(model(X), model(X))
    model.eval()
    assert torch.equal(model(X), model(X))


def test_dropout_of_the_map_is_the_layer_s_own():
    model = Block("matmul")
    torch.manual_seed(1)
    expected = model(X)
    gfsa.plug(model, unknown="trace")
    torch.manual_seed(1)
    assert torch.equal(model(X), expected)


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


class TwoInputs(nn.Module):
    """Attention whose inputs are used as its ``way`` says."""

    way = "cross"

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.attend(*getattr(self, self.way)(x, y))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        given = ((self.q, queries), (self.k, keys), (self.v, values))
        q, k, v = (
            project(tokens).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project, tokens in given
        )
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)

    def cross(self, x, y):
        return x, y, y

    def cross_with_positions(self, x, y):
        positions = torch.arange(DIM, dtype=x.dtype)
        return x + positions, y + positions, y + positions

    def cross_in_one_tensor(self, x, y):
        both = torch.stack([x, y])
        return both[0], both[1], both[1]

    def cross_in_features(self, x, y):
        queries, keys = torch.cat([x, y], -1).chunk(2, -1)
        return queries, keys, keys

    def cross_in_one_sequence(self, x, y):
        queries, keys = torch.cat([x, y], 1).chunk(2, 1)
        return queries, keys, keys

    def other_values_only(self, x, y):
        return x, x, y

    def positions(self, x, y):
        return x + y, x + y, x

    def positions_in_values(self, x, y):
        return x + y, x + y, x + y

    def unused(self, x, y):
        return x, x, x


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


class Returning(WrittenAttention):
    """Attention that returns its weights, in one of many shapes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.weights = None
        y = super().forward(x)
        return y, self.weights

    def by_as_they_are(self, q, k, v):
        self.weights = (q @ k.mT).softmax(-1)
        return self.weights @ v

    def by_before_dropout(self, q, k, v):
        self.weights = (q @ k.mT).softmax(-1)
        return self.drop(self.weights) @ v

    def by_before_merging(self, q, k, v):
        self.weights = (q @ k.mT).softmax(-1)
        merged = self.weights.to(v.dtype).reshape(-1, *q.shape[2:3] * 2)
        return torch.bmm(merged, v.flatten(0, 1)).unflatten(0, (-1, HEADS))

    def by_after_merging(self, q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        attention = (q @ k.mT).softmax(-1)
        self.weights = attention.unflatten(0, (-1, HEADS))
        return (self.drop(attention) @ v).unflatten(0, (-1, HEADS))

    def by_columns(self, q, k, v):
        self.weights = (q @ k.mT).softmax(-1)
        return (v.mT @ self.weights.mT).mT

    def by_other_order_in_memory(self, q, k, v):
        weights = (q @ k.mT).softmax(-1)
        y = weights.transpose(0, 1) @ v.transpose(0, 1)
        self.weights = weights
        return y.transpose(0, 1)

    def by_mean_over_heads(self, q, k, v):
        attention = (q @ k.mT).softmax(-1)
        y = attention @ v
        self.weights = attention.mean(1)
        return y

    def by_mean_before_the_product(self, q, k, v):
        attention = (q @ k.mT).softmax(-1)
        self.weights = attention.mean(1)
        return attention.reshape(attention.shape) @ v

    def by_before_mixing(self, q, k, v):
        self.weights = (q @ k.mT).softmax(-1)
        return torch.einsum("bhij,gh->bgij", self.weights, self.mix) @ v


RETURNED = [way.removeprefix("by_") for way in vars(Returning) if way.startswith("by_")]


@pytest.mark.parametrize("way", [way for way in RETURNED if way != "before_mixing"])
@torch.no_grad()
def test_weights_that_a_module_returns_are_those_of_the_filter(way):
    module = Returning().double().eval()
    module.way = way
    x = X.double()
    plain = module(x)[1]
    gfsa.plug(module, unknown="trace")
    (coefficients,) = disturb(module)
    y, weights = module(x)
    full = copy.deepcopy(module)
    gfsa.unplug(full)
    full.way = "as_they_are"
    expected = matrix_polynomial(coefficients, full(x)[1])
    values = full.qkv(x).unflatten(-1, (3, HEADS, -1))[:, :, 2].transpose(1, 2)
    by_definition = full.proj((expected @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(y, by_definition, rtol=0, atol=1e-12)
    expected = expected.mean(1) if weights.dim() == 3 else expected
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
    assert weights.shape == plain.shape


def test_maps_are_not_built_where_they_are_not_returned(monkeypatch):
    monkeypatch.delattr(gfsa.GraphFilter, "map")
    assert traced("matmul")(X).isfinite().all()
    module = Returning()
    module.way = "as_they_are"
    gfsa.plug(module, unknown="trace")
    with pytest.raises(AttributeError, match="map"):
        module(X)


def test_weights_without_a_filtered_map_are_refused():
    module = Returning()
    module.way = "before_mixing"
    gfsa.plug(module, unknown="trace")
    with pytest.raises(TraceError, match="not the map that multiplies its values"), pytest.warns():
        module(X)


def test_places_that_are_cross_attention_are_left_alone():
    model = nn.ModuleDict({"attn1": Reader(), "attn2": Reader(), "cross_attn": Reader()})
    report = gfsa.plug(model, unknown="trace")
    assert list(report.plugged) == ["attn1"]
    assert all("cross-attention" in why for why in report.skipped.values())


def test_unknown_attention_is_reported_and_left_alone_by_default():
    model = nn.Sequential(Block("matmul"), nn.TransformerEncoderLayer(DIM, HEADS))
    report = gfsa.plug(model)
    assert list(report.plugged) == ["1.self_attn"]
    assert "unknown='trace'" in report.skipped["0.attn"]
    assert "gfsa.register_adapter" in report.skipped["0.attn"]
    with pytest.raises(ValueError, match="no adapter knows WrittenAttention"):
        gfsa.plug(Block("matmul"))


def test_attention_without_a_number_of_heads():
    model = Block("matmul")
    del model.attn.num_heads
    with pytest.raises(ValueError, match="no attribute with its number of heads"):
        gfsa.plug(model, unknown="trace")


class OutsideTorch(torch.autograd.Function):
    """A product that the tracer does not see, as that of quantised layers."""

    @staticmethod
    def forward(ctx, x, weight):
        return torch.from_numpy(x.detach().numpy() @ weight.detach().numpy().T)


class Quantised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return OutsideTorch.apply(x, self.weight)


def test_linear_layers_that_compute_outside_torch():
    model = Block("matmul").eval()
    model.attn.qkv = Quantised(DIM, 3 * DIM)
    expected = model(X)
    gfsa.plug(model, unknown="trace")
    assert torch.equal(model(X), expected)
    assert not model.attn.qkv._forward_hooks


class Extension(nn.Linear):
    """A layer none of whose operations is dispatched, as with a compiled extension."""

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return F.linear(x, self.weight, self.bias)


def test_another_tensor_in_a_layer_that_computes_outside_torch_is_another_path():
    class Chosen(TwoInputs):
        def forward(self, x, y):
            return self.attend(x, *([y] * 2 if self.way == "cross" else [x] * 2))

    module = Chosen().eval()
    module.q, module.k, module.v = (Extension(DIM, DIM) for _ in range(3))
    module.way = "unused"
    gfsa.plug(module, unknown="trace")
    y = torch.randn(B, N, DIM)
    for _ in range(2):
        module(X, y)
    module.way = "cross"
    with pytest.raises(TraceError, match="queries come from x and its keys from y"):
        module(X, y)
    assert not module.q._forward_hooks


def test_what_looks_like_attention():
    model = Block("matmul")
    assert looks_like_attention(model.attn)
    assert not looks_like_attention(model)
    assert not looks_like_attention(nn.Linear(3, 3))
    wrapper = type("SelfAttentionBlock", (nn.Module,), {})()
    wrapper.num_heads, wrapper.inner = HEADS, model.attn
    assert not looks_like_attention(wrapper), "the innermost is meant"


def test_compiles_into_one_graph_once_verified():
    for way in ("mixed_heads", "sdpa", "merged_heads", "heads_before_samples_merged"):
        model = Block(way).eval()
        gfsa.plug(model, unknown="trace", wK=0.2)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        if way == "sdpa":
            with pytest.raises(Exception, match="Run one forward without"):
                compiled(X)
            torch.compiler.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = model(X)
        torch.testing.assert_close(compiled(X), expected)


def test_a_graph_breaks_where_nothing_is_verified_yet():
    model = traced("heads_before_samples_merged")
    compiled = torch.compile(model, backend="aot_eager")
    for x in (X[:1], X[:1], X, X, torch.randn(5, N, DIM)):
        torch.testing.assert_close(compiled(x), model(x))


def test_copies_of_a_verified_module_stay_verified_and_a_fresh_one_is_not():
    model = traced("joined")
    fresh = copy.deepcopy(model)
    model(X)
    assert copy.deepcopy(model).attn.__dict__["_gfsa_memory"].paths
    assert not fresh.attn.__dict__["_gfsa_memory"].paths


@torch.no_grad()
def test_convit_mixes_two_maps():
    model = timm.create_model(
        "convit_tiny",
        img_size=32,
        patch_size=8,
        embed_dim=12,
        depth=2,
        num_heads=3,
        local_up_to_layer=1,
    )
    report = gfsa.plug(model, dry_run=True, unknown="trace")
    assert list(report.plugged) == ["blocks.0.attn", "blocks.1.attn"]
    with pytest.raises(ValueError, match="no adapter knows GPSA"):
        gfsa.plug(model)
    attention = model.blocks[0].attn.double()
    nn.init.normal_(attention.pos_proj.weight)
    x = torch.randn(3, 16, attention.dim, dtype=torch.float64)
    attention(x)  # sets the relative positions of this length
    matrix = attention.get_attention(x)
    values = attention.v(x).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
    gfsa.plug(attention, unknown="trace")
    (coefficients,) = disturb(attention)
    y = matrix_polynomial(coefficients, matrix) @ values
    expected = attention.proj(y.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected, rtol=0, atol=1e-12)


TEXT = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}


def deberta() -> nn.Module:
    config = hf.DebertaV2Config(
        **TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
    )
    return hf.DebertaV2Model(config)


def gpt_neo() -> nn.Module:
    config = hf.GPTNeoConfig(
        vocab_size=40,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=32,
    )
    return hf.GPTNeoModel(config)


def swin_v2() -> nn.Module:
    config = hf.Swinv2Config(
        image_size=32, patch_size=4, embed_dim=12, depths=[2, 1], num_heads=[2, 3], window_size=3
    )
    return hf.Swinv2Model(config)


def read(model: nn.Module) -> Tensor:
    dtype = next(model.parameters()).dtype
    if isinstance(model, hf.Swinv2Model):
        images = torch.linspace(-1, 1, 2 * 3 * 32 * 32, dtype=dtype).sin().view(2, 3, 32, 32)
        return model(pixel_values=images).last_hidden_state
    ids = torch.arange(22).view(2, 11)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    options = {"use_cache": False} if isinstance(model, hf.GPTNeoModel) else {}
    return model(input_ids=ids, attention_mask=mask, **options).last_hidden_state[mask.bool()]


@pytest.mark.parametrize(
    ("name", "build"), [("DeBERTa-v2", deberta), ("GPT-Neo", gpt_neo), ("Swin-V2", swin_v2)]
)
def test_transformers_off_the_attention_interface(name, build, tmp_path, supported):
    report = check_backbone(build, read, tmp_path, unknown="trace")
    assert set(report.how.values()) == {"tracer"}
    supported("transformers", name, report)


def test_decoding_with_a_cache_is_refused():
    model = gpt_neo().eval()
    gfsa.plug(model, unknown="trace")
    disturb(model)
    first = model(input_ids=torch.arange(5)[None], use_cache=True)
    with pytest.raises(TraceError, match="decoding with a cache"):
        model(input_ids=torch.tensor([[5]]), past_key_values=first.past_key_values)


class Choosing(TwoInputs):
    """One list of operations; an argument or an attribute chooses what they are applied to."""

    memory: Tensor | None = None
    positions_of_keys = None

    def forward(self, x, y=None, use_y=False, start=0, order=(0, 2, 1, 3), back=(0, 2, 1, 3)):
        n = len(x[0]) // 2
        keys = y if use_y else x if self.memory is None else self.memory
        keys = keys[:, start : start + n]
        queries = x[:, :n]
        if self.positions_of_keys is not None:
            queries, keys = queries[:, self.positions], keys[:, self.positions_of_keys]
        given = ((self.q, queries), (self.k, keys), (self.v, keys))
        q, k, v = (
            project(tokens).unflatten(-1, (HEADS, -1)).permute(order) for project, tokens in given
        )
        return ((q @ k.mT).softmax(-1) @ v).permute(back).flatten(2)


def test_the_same_operations_on_another_tensor_are_another_path():
    x, y = torch.randn(2, B, 2 * N, DIM)

    def verified() -> Choosing:
        module = Choosing().eval()
        gfsa.plug(module, unknown="trace")
        module(x, y)
        return module

    with pytest.raises(TraceError, match="queries come from x and its keys from y"):
        verified()(x, y, use_y=True)
    module = verified()
    module.memory = y.clone()
    with pytest.raises(TraceError, match="could not be followed"):
        module(x, y)
    with pytest.raises(TraceError, match="different parts of x"):
        verified()(x, y, start=N)


def test_another_flag_is_not_verified_where_a_graph_is_compiled():
    class Flagged(WrittenAttention):
        def forward(self, x, y, use_y=False):
            b, n, _ = x.shape
            (q, _, _), (_, k, v) = (
                self.qkv(tokens).reshape(b, n, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
                for tokens in (x, y if use_y else x)
            )
            return torch.matmul(torch.matmul(q, k.transpose(-2, -1)).softmax(-1), v)

    module = Flagged().eval()
    gfsa.plug(module, unknown="trace", wK=0.2)
    y = torch.randn(B, N, DIM)
    expected = module(X, y)
    compiled = torch.compile(module, backend="eager")
    torch.testing.assert_close(compiled(X, y), expected)
    torch.testing.assert_close(compiled(X, y, use_y=False), expected)
    with pytest.raises(TraceError, match="queries come from x and its keys from y"):
        compiled(X, y, use_y=True)


def test_another_index_of_the_same_size_is_another_path():
    module = Choosing().eval()
    gfsa.plug(module, unknown="trace")
    module.positions = module.positions_of_keys = torch.randperm(N)
    x = torch.randn(B, 2 * N, DIM)
    for _ in range(2):
        module(x)
    module.positions_of_keys = module.positions.flip(0)
    with pytest.raises(TraceError, match="the same tokens in another order"):
        module(x)


def test_another_order_of_axes_is_another_path():
    module = Choosing().eval()
    gfsa.plug(module, unknown="trace")
    disturb(module)
    x = torch.randn(HEADS, 2 * N, DIM)
    heads_first = {"order": (2, 0, 1, 3), "back": (1, 2, 0, 3)}
    expected = module(x)
    module(x[1:])
    torch.testing.assert_close(module(x, **heads_first), expected)


def test_other_sizes_are_the_same_path():
    module = Choosing().eval()
    gfsa.plug(module, unknown="trace")
    for batch, tokens in ((3, 2 * N), (3, 4 * N), (5, 2 * N), (2, 6)):
        module(torch.randn(batch, tokens, DIM))
    assert len(module.__dict__["_gfsa_memory"].paths) == 1


class Catching(WrittenAttention):
    """Returns its input where its attention raises."""

    caught: type[BaseException] = Exception
    scale = None

    def forward(self, x):
        try:
            return super().forward(x if self.scale is None else x * self.scale)
        except self.caught:
            return x


@pytest.mark.parametrize("caught", [Exception, BaseException])
def test_a_new_path_is_verified_in_a_module_that_catches_errors(caught):
    module = Catching().eval()
    module.caught = caught
    gfsa.plug(module, unknown="trace")
    expected = module(X)
    module.scale = 1.0
    assert torch.equal(module(X), expected)


def test_a_refusal_is_raised_though_the_module_catches_it():
    module = Catching().eval()
    module.way = "reordered_keys"
    gfsa.plug(module, unknown="trace")
    for _ in range(2):
        with pytest.raises(TraceError, match="the same tokens in another order"):
            module(X)


def test_another_sequence_is_refused_though_the_module_catches_it():
    class CatchingTwo(TwoInputs):
        def forward(self, x, y):
            try:
                return super().forward(x, y)
            except ValueError:
                return x

    module = CatchingTwo()
    gfsa.plug(module, unknown="trace")
    module(X, X.clone())
    with pytest.raises(ValueError, match="its key has other values than its query"):
        module(X, X + 1)


class OwnState(WrittenAttention):
    """Counts its forwards, and keeps a running mean of its inputs in training."""

    def __init__(self, buffer: bool = True) -> None:
        super().__init__()
        self.calls = 0
        if buffer:
            self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x, scale=None, chunk=None):
        self.calls += 1
        if self.training and hasattr(self, "mean"):
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        if self.training:
            x = F.dropout(x, 0.1)
        if scale is not None:
            x = x * scale
        return super().forward(x if chunk is None else torch.cat(x.split(chunk, 1), 1))


def test_a_running_mean_is_updated_once_on_a_new_path():
    module = OwnState()
    gfsa.plug(module, unknown="trace")
    for scale in (None, None, 2.0, None):
        before = module.mean.clone()
        module(X, scale)
        torch.testing.assert_close(module.mean, 0.9 * before + 0.1 * X.mean((0, 1)))
    assert module.calls == 4


def test_training_after_evaluation_draws_random_numbers_once():
    module = OwnState(buffer=False).eval()
    gfsa.plug(module, unknown="trace")
    plain = OwnState(buffer=False)
    drawn = []
    module(X)
    for attention in (plain, module):
        torch.manual_seed(0)
        attention.train()(X)
        drawn.append(torch.rand(1))
    assert torch.equal(*drawn)
    assert module.calls == 2


@pytest.mark.parametrize("batch", [1, HEADS])
def test_a_batch_that_shows_no_layout_runs_once(batch):
    module = OwnState().eval()
    gfsa.plug(module, unknown="trace")
    module(X)
    module.calls = 0
    x = torch.randn(batch, N, DIM)
    for scale in (2.0, 2.0, 2.0):
        module(x, scale)
    assert module.calls == 3
    for _ in range(4):
        module(x, None, 4)
    assert module.calls == 7


def test_a_module_of_many_paths_runs_once():
    module = OwnState().eval()
    gfsa.plug(module, unknown="trace")
    lengths = range(10, 200, 5)
    for n in lengths:
        module(torch.randn(B, n, DIM), None, 5)
    assert len(module.__dict__["_gfsa_memory"].paths) == 32
    module.calls = 0
    for n in range(205, 305, 10):
        module(torch.randn(B, n, DIM), None, 5)
    assert module.calls == 10
