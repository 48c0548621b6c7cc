"""The tracer: what it filters and refuses, candidates, returned maps, other tokens, sizes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import gfsa
from gfsa.plugs.tracing.candidates import (
    looks_like_attention,
    refusal_by_class_name,
    refusal_by_code,
)
from gfsa.plugs.tracing.capture import TraceError
from support.plugging import check_backbone, disturb, matrix_polynomial
from support.written_attention import (
    DIM,
    FOLLOWED,
    HEADS,
    B,
    Block,
    N,
    TwoInputs,
    WrittenAttention,
    X,
    run,
    traced,
)

# the reference of check_backbone expects heads after samples, and as many keys as queries; these
# are compared head by head, some of them further down
COMPARED_BY_HEAD = {w for w in FOLLOWED if "mixed" in w or "before" in w or "groups" in w}


@pytest.mark.parametrize("way", [w for w in FOLLOWED if w not in COMPARED_BY_HEAD])
def test_followed(way, tmp_path):
    # torch has another kernel for inputs without a head axis, which the filter's operator gives
    another_kernel = way in ("sdpa_merged", "einsum_with_one_head_of_values")
    identity = 1e-6 if another_kernel else 0.0
    report = check_backbone(lambda: Block(way), run, tmp_path, identity, unknown="trace")
    assert report.how == {"attn": "tracer"}


def test_mixed_heads_are_followed_and_their_rows_reported():
    model = Block("mixed_heads").double().eval()
    gfsa.plug(model, unknown="trace", filter=gfsa.Twicing)
    with pytest.warns(UserWarning, match="rows of the attention map of attn do not sum to one"):
        got = model(X.double())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(X.double()), got), "said once"
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
    ("sdpa_merged_with_groups", "with no axis for its 4 heads"),
    ("added_product", "in baddbmm with a tensor"),
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
    ("another_product", "the same tokens in another order"),
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
    assert not torch.equal(model(X), model(X))
    model.eval()
    assert torch.equal(model(X), model(X))


def test_unknown_attention_is_reported_and_left_alone_by_default():
    model = nn.Sequential(Block("matmul"), nn.TransformerEncoderLayer(DIM, HEADS))
    report = gfsa.plug(model)
    assert list(report.plugged) == ["1.self_attn"]
    assert "unknown='trace'" in report.skipped["0.attn"]
    assert "gfsa.register_adapter" in report.skipped["0.attn"]
    with pytest.raises(ValueError, match="no adapter knows WrittenAttention"):
        gfsa.plug(Block("matmul"))


def test_what_looks_like_attention():
    model = Block("matmul")
    assert looks_like_attention(model.attn)
    assert not looks_like_attention(model)
    assert not looks_like_attention(nn.Linear(3, 3))
    wrapper = type("SelfAttentionBlock", (nn.Module,), {})()
    wrapper.num_heads, wrapper.inner = HEADS, model.attn
    assert not looks_like_attention(wrapper), "the innermost is meant"


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


# maps in another order, or of other heads, than that of the product
OTHERS = ["columns", "other_order_in_memory", "before_mixing"]


@pytest.mark.parametrize("way", [way for way in RETURNED if way not in OTHERS])
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


def test_weights_are_found_in_whatever_holds_them():
    class Output(dict):
        pass

    class Holding(Returning):
        def forward(self, x: Tensor):
            y, weights = super().forward(x)
            self.kept = Output(y=y, more=[weights])
            return self.kept

    module = Holding().eval()
    module.way = "as_they_are"
    plain = module(X)["more"][0]
    gfsa.plug(module, unknown="trace", wK=0.3)
    found = module(X)
    assert not torch.allclose(found["more"][0], plain)
    # as a module that fills its caller's dict expects
    assert found is module.kept


def test_maps_are_not_built_where_they_are_not_returned(monkeypatch):
    monkeypatch.delattr(gfsa.GraphFilter, "map")
    assert traced("matmul")(X).isfinite().all()
    module = Returning()
    module.way = "as_they_are"
    gfsa.plug(module, unknown="trace")
    with pytest.raises(AttributeError, match="map"):
        module(X)


@pytest.mark.parametrize("way", OTHERS)
def test_weights_without_a_filtered_map_are_refused(way):
    module = Returning()
    module.way = way
    gfsa.plug(module, unknown="trace")
    with pytest.raises(TraceError, match="not the map that multiplies its values"):
        module(X)


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


class SpoolAttention(TwoInputs):
    """Self-attention whose name contains "pool"."""


def test_a_name_alone_does_not_make_attention_pool() -> None:
    layer = SpoolAttention()
    assert refusal_by_class_name(layer) is None
    layer.pool = nn.AdaptiveAvgPool2d(7)
    assert "pool" in str(refusal_by_code(layer)), "a fixed number of keys"
    layer.probe = nn.Parameter(torch.zeros(1, 1, DIM))
    assert refusal_by_class_name(layer) is not None


class Convolved(WrittenAttention):
    """Its projections look at neighbouring tokens, as those of CvT do."""

    def __init__(self, groups: int, width: int) -> None:
        super().__init__()
        self.qkv = nn.Conv1d(DIM, 3 * DIM, width, padding=width // 2, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        # a group is a head
        qkv = self.qkv(x.mT).reshape(b, HEADS, 3, DIM // HEADS, n).permute(2, 0, 1, 4, 3)
        y = self.by_matmul(*qkv.unbind(0))
        return y.transpose(1, 2).reshape(b, n, DIM)


def test_projections_that_mix_tokens_are_refused() -> None:
    module = Convolved(1, 3)
    gfsa.plug(module, unknown="trace")
    with pytest.raises(TraceError, match="its projections mix tokens"):
        module(X)


class Patches(nn.Module):
    """Its tokens are patches of an image: each is several places along the axes of other tokens."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Conv2d(3, 3 * DIM, 2, stride=2)

    def forward(self, image: Tensor) -> Tensor:
        qkv = self.qkv(image).flatten(2).unflatten(1, (3, self.num_heads, -1)).mT
        q, k, v = qkv.unbind(1)
        return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize(("heads", "batch"), [(1, 3), (2, 3), (HEADS, HEADS)])
def test_patches_of_an_image_may_be_tokens(heads: int, batch: int) -> None:
    module, images = Patches(heads).eval(), torch.randn(batch, 3, 6, 6)
    expected = module(images)
    gfsa.plug(module, unknown="trace")
    torch.testing.assert_close(module(images), expected)


@pytest.mark.parametrize("batch", [2, HEADS])
def test_heads_with_features_of_their_own_are_no_samples(batch: int) -> None:
    module = Convolved(HEADS, 1).double().eval()
    x = torch.randn(batch, N, DIM, dtype=torch.float64)
    gfsa.plug(module, unknown="trace")
    disturb(module)
    alone = torch.cat([module(sample[None]) for sample in x])
    torch.testing.assert_close(module(x), alone)


class OwnSoftmax(torch.autograd.Function):
    """As XSoftmax of SEW-D: each score has a gradient of its whole row."""

    @staticmethod
    def forward(ctx, scores):
        y = torch.softmax(scores, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, y, -1, y.dtype)


class Keeping(WrittenAttention):
    """Weights of queries that begin at zero, and a bias that is kept once it was computed."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.kept: dict[str, Tensor] = {}
        nn.init.zeros_(self.qkv.weight[:DIM])
        nn.init.zeros_(self.mix)

    def by_kept_bias(self, q, k, v):
        if "bias" not in self.kept:
            self.kept["bias"] = self.mix[:, :1, None] * 1.0
        return (q @ k.mT + self.kept["bias"]).softmax(-1) @ v

    def by_own_softmax(self, q, k, v):
        return OwnSoftmax.apply(q @ k.mT) @ v

    def by_own_softmax_of_rolled_values(self, q, k, v):
        # two tokens of each sample in one row
        return OwnSoftmax.apply(q @ k.mT) @ (v + v.roll(1, 2))


@torch.no_grad()
def test_zero_weights_kept_tensors_and_a_softmax_of_its_own() -> None:
    for way in ("kept_bias", "own_softmax"):
        module = Keeping(way).eval()
        expected = module(X)
        module.kept.clear()
        gfsa.plug(module, unknown="trace")
        torch.testing.assert_close(module(X), expected)
        if way == "kept_bias":
            assert not module.kept["bias"].any(), "that of the forward, not of the proof"
    module = Keeping("own_softmax_of_rolled_values")
    gfsa.plug(module, unknown="trace")
    with pytest.raises(TraceError, match="mix tokens"):
        module(X)


def test_another_sequence_behind_a_softmax_of_its_own_is_refused() -> None:
    class Hidden(TwoInputs):
        def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return OwnSoftmax.apply(self.q(queries) @ self.k(keys).mT) @ self.v(values)

    module = Hidden()
    module.num_heads = 1
    gfsa.plug(module, unknown="trace")
    with pytest.raises(TraceError, match="autograd function of its own"):
        module(X, X.flip(1))


def test_where_gradients_are_off_or_transformed() -> None:
    model = traced("matmul")
    expected = model(X)
    for batch in (X, X[:1]):
        fresh = copy.deepcopy(model)
        fresh.attn.__dict__["_gfsa_memory"].verified.clear()
        with torch.inference_mode():
            torch.testing.assert_close(fresh(batch.clone()), expected[: len(batch)])
    fresh.attn.__dict__["_gfsa_memory"].verified.clear()
    by_sample = torch.vmap(lambda x: fresh(x[None])[0])(X)
    torch.testing.assert_close(by_sample, expected)
    unverified = traced("matmul")
    with pytest.raises(TraceError, match=r"without torch\.func first"):
        torch.vmap(lambda x: unverified(x[None])[0])(X)
