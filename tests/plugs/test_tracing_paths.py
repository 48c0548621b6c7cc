"""A traced module is verified once for each path, and no forward is run twice for it."""

from __future__ import annotations

import copy
import functools
from collections import Counter

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import gfsa
from gfsa.plugs.tracing.capture import TraceError
from support.plugging import disturb
from support.written_attention import (
    DIM,
    HEADS,
    B,
    Block,
    N,
    TwoInputs,
    WrittenAttention,
    X,
    traced,
)


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


def test_each_size_is_verified_once():
    module = Choosing().eval()
    gfsa.plug(module, unknown="trace")
    for batch, tokens in ((3, 2 * N), (3, 4 * N), (5, 2 * N), (2, 6), (3, 2 * N), (2, 6)):
        module(torch.randn(batch, tokens, DIM))
    memory = module.__dict__["_gfsa_memory"]
    assert len(memory.verified) == 4
    assert len(memory.for_any_batch) == 1


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


def test_compiles_into_one_graph_once_verified():
    for way in ("mixed_heads", "sdpa", "merged_heads", "heads_before_samples_merged"):
        model = Block(way).eval()
        gfsa.plug(model, unknown="trace", wK=0.2)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        if way == "sdpa":
            with pytest.raises(Exception, match="Run one forward without"):
                compiled(X)
            torch.compiler.reset()
        expected = model(X)
        torch.testing.assert_close(compiled(X), expected)


def test_a_graph_breaks_where_nothing_is_verified_yet():
    model = traced("heads_before_samples_merged")
    compiled = torch.compile(model, backend="aot_eager")
    for x in (X[:1], X[:1], X, X, torch.randn(5, N, DIM)):
        torch.testing.assert_close(compiled(x), model(x))


def test_one_sample_does_not_show_what_heads_of_several_lie_between():
    class Windows(WrittenAttention):
        def by_matmul(self, q, k, v):
            # samples, heads and windows of two tokens in one axis
            shape = q.shape
            q, k, v = (x.reshape(-1, 2, x.shape[-1]) for x in (q, k, v))
            return ((q @ k.mT).softmax(-1) @ v).view(shape)

    model = nn.Sequential(Windows()).eval()
    gfsa.plug(model, unknown="trace", wK=0.2)
    x = torch.randn(B, 6, DIM)
    model(x[:1])
    for run in (model, torch.compile(model, backend="eager")):
        with pytest.raises(TraceError, match=f"with no axis for its {HEADS} heads"):
            run(x)


def test_copies_of_a_verified_module_stay_verified_and_a_fresh_one_is_not():
    model = traced("joined")
    fresh = copy.deepcopy(model)
    model(X)
    assert copy.deepcopy(model).attn.__dict__["_gfsa_memory"].verified
    assert not fresh.attn.__dict__["_gfsa_memory"].verified


def test_export_needs_a_forward_before_it():
    model = nn.Sequential(Block("matmul")).eval()
    gfsa.plug(model, unknown="trace", wK=0.2)
    with pytest.raises(TraceError, match=r"Run one forward without .* torch\.export first"):
        torch.export.export(model, (X,))
    expected = model(X)
    torch.testing.assert_close(torch.export.export(model, (X,)).module()(X), expected)


def test_fx_needs_traced_layers_as_leaves():
    model = nn.Sequential(Block("matmul")).eval()
    gfsa.plug(model, unknown="trace", wK=0.2)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"got Proxy; torch\.fx .* a leaf"):
            torch.fx.symbolic_trace(model)
        # verified or not
        model(X)


def test_a_graph_that_breaks_inside_of_a_traced_layer_is_refused():
    """Parts that are compiled on their own are not followed; an error of the compiler it was."""

    class Breaks(WrittenAttention):
        def by_matmul(self, q, k, v):
            torch._dynamo.graph_break()
            y = super().by_matmul(q, k, v)
            torch._dynamo.graph_break()
            return y

    model = nn.Sequential(Breaks(), Breaks()).eval()
    gfsa.plug(model, unknown="trace")
    model(X)
    torch._dynamo.reset()
    with pytest.raises(TraceError, match=r"cannot filter 0 \(Breaks\) by tracing: .* be followed"):
        torch.compile(lambda x: model(x), backend="eager")(X)


def test_a_compiled_part_of_a_forward_is_refused():
    module = WrittenAttention().eval()
    module.by_matmul = torch.compile(module.by_matmul, backend="eager")
    gfsa.plug(module, unknown="trace")
    with pytest.raises(TraceError, match="parts that it compiles on their own"):
        module(X)


class Remembers(WrittenAttention):
    """Counts its forwards in an object of the caller's and by batch norm, on one of two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x, calls=None):
        if calls is not None:
            calls["forward"] += 1
        x = F.dropout(self.norm(x.mT).mT, 0.1, self.training)
        return super().forward(x * 1.0 if len(x) > 2 else x)


def test_no_forward_that_changes_something_is_run_twice():
    attention, plain, calls = Remembers(), Remembers(), Counter()
    gfsa.plug(attention, unknown="trace")
    drawn = []
    for module in (plain, attention):
        torch.manual_seed(0)
        for batch in (3, 2, 3, HEADS, 1):
            # the second batch takes a new path, the last two show no layout
            module(torch.randn(batch, N, DIM))
        drawn.append(torch.rand(1))
    assert torch.equal(*drawn)
    assert attention.norm.num_batches_tracked == 5
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


def decay(score, b, h, i, j):
    return score - 0.2 * (h + 1) * (i - j)


def causal(b, h, i, j):
    return i >= j


def written_out(q, k, v, score_mod, block_mask, enable_gqa, return_lse):
    """What flex_attention computes."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    b, h, i, j = (
        torch.arange(n).view(-1, *(1,) * d)
        for n, d in zip(q.shape[:3] + k.shape[2:3], (3, 2, 1, 0), strict=True)
    )
    scores = decay(q @ k.mT * q.shape[-1] ** -0.5, b, h, i, j).masked_fill(i < j, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


class Flex(nn.Module):
    """Attention by flex_attention, with half as many keys as heads."""

    def __init__(self, flex) -> None:
        super().__init__()
        self.num_heads, self.flex = HEADS, flex
        self.qkv = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor, flipped: bool = False, twice: bool = False) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2).split((4, 2, 2), 1)
        mask = create_block_mask(causal, None, None, x.shape[1], x.shape[1], device="cpu")
        call = functools.partial(self.flex, enable_gqa=True, return_lse=True)
        y, sums = call(q, k.flip(2) if flipped else k, v, decay, mask)
        if twice:
            y, sums = call(y, k, v, decay, mask)
        return (y * sums[..., None].sigmoid()).transpose(1, 2).flatten(2)


FLEX = {"plain": flex_attention, "compiled": torch.compile(flex_attention, backend="aot_eager")}
FILTERS = [{"wK": 0.2}, {"K": None, "w1": 0.5}, {"filter": gfsa.Exclusive, "depth": True}]


@pytest.mark.parametrize("how", FLEX)
@torch.no_grad()  # flex_attention has no gradients on a CPU
def test_flex_attention(how):
    torch.compiler.reset()
    flex, dense = (nn.Sequential(Flex(f), Flex(f)).eval() for f in (FLEX[how], written_out))
    dense.load_state_dict(flex.state_dict())
    torch.testing.assert_close(flex(X), dense(X))
    for options in FILTERS if how == "plain" else FILTERS[:1]:
        for model in (flex, dense):
            gfsa.plug(model, unknown="trace", inputs=X, **options)
        for seen in (X, X, torch.randn(5, HEADS, DIM)):
            torch.testing.assert_close(flex(seen), dense(seen))
            for parameter in flex.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            dense.load_state_dict(flex.state_dict())
        gfsa.unplug(flex), gfsa.unplug(dense)
    gfsa.plug(flex[0], unknown="trace")
    for refused in ({"flipped": True}, {"twice": True}):
        with pytest.raises(TraceError, match=r"in another order|more than one attention product"):
            flex[0](X, **refused)
