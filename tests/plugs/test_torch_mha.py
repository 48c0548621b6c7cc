"""torch's multi-head attention: every layout and mask, both fast paths, and cross-attention."""

from __future__ import annotations

import copy
import itertools
import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

import gfsa
from gfsa.adapters.torch_mha import FilteredMultiheadAttention
from support.plugging import check_backbone, disturb, filtered_softmax, slow_path

B, N, E, H = 3, 7, 16, 4

MASKS = ["none", "bool", "float", "bool per head", "float per head", "causal"]


def mask_of(kind: str) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "causal":
        return nn.Transformer.generate_square_subsequent_mask(N).double()
    shape = (B * H, N, N) if "per head" in kind else (N, N)
    if "bool" in kind:
        # True is left out; everybody sees itself
        return (torch.rand(shape) < 0.3) & ~torch.eye(N, dtype=torch.bool)
    return torch.randn(shape, dtype=torch.float64)


def padding_of(kind: str) -> Tensor | None:
    if kind == "none":
        return None
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[0, 5:] = padding[2, 6:] = True
    if kind == "bool":
        return padding
    return torch.zeros(B, N, dtype=torch.float64).masked_fill(padding, -math.inf)


def _single(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask.float()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_every_mask_and_layout_equals_the_dense_formula(batch_first, need_weights):
    mha = nn.MultiheadAttention(E, H, batch_first=batch_first).double().eval()
    plugged = copy.deepcopy(mha)
    gfsa.plug(plugged)
    coefficients = disturb(plugged)
    x = torch.randn((B, N, E) if batch_first else (N, B, E), dtype=torch.float64)
    for mask, padding in itertools.product(MASKS, ["none", "bool", "float"]):
        options = {
            "attn_mask": mask_of(mask),
            "key_padding_mask": padding_of(padding),
            "need_weights": need_weights,
            "is_causal": mask == "causal",
        }
        if "none" not in (mask, padding) and ("bool" in mask) != (padding == "bool"):
            continue  # torch wants the two masks alike
        with slow_path(), filtered_softmax(mha, coefficients):
            expected, weights = mha(x, x, x, **options)
        got, filtered = plugged(x, x, x, **options)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12, msg=f"{mask}, {padding}")
        assert (filtered is None) == (not need_weights)
        if need_weights:
            torch.testing.assert_close(filtered, weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("need_weights", [True, False])
def test_starts_as_the_layer_it_was_to_the_bit(need_weights):
    for batch_first, mask, padded in itertools.product([True, False], MASKS, [True, False]):
        mha = nn.MultiheadAttention(E, H, batch_first=batch_first).eval()
        x = torch.randn((B, N, E) if batch_first else (N, B, E))
        given = mask_of(mask)
        alike = "bool" if given is None or given.dtype == torch.bool else "float"
        options = {
            "attn_mask": _single(given),
            "key_padding_mask": _single(padding_of(alike)) if padded else None,
            "need_weights": need_weights,
            "average_attn_weights": mask == "float",
            "is_causal": mask == "causal",
        }
        with slow_path():
            expected = mha(x, x, x, **options)
        gfsa.plug(mha)
        got = mha(x, x, x, **options)
        assert torch.equal(got[0], expected[0])
        assert not need_weights or torch.equal(got[1], expected[1])


def test_unbatched_and_other_widths_of_values():
    for options, width in (({}, E), ({"kdim": E, "vdim": 10}, 10), ({"bias": False}, E)):
        mha = nn.MultiheadAttention(E, H, **options).double().eval()
        plugged = copy.deepcopy(mha)
        gfsa.plug(plugged)
        coefficients = disturb(plugged)
        x, v = torch.randn(N, E).double(), torch.randn(N, width).double()
        v = x if width == E else v
        padding = padding_of("bool")[0]
        with filtered_softmax(mha, coefficients):
            expected, weights = mha(x, x, v, key_padding_mask=padding)
        got, filtered = plugged(x, x, v, key_padding_mask=padding)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(filtered, weights, rtol=0, atol=1e-12)


def test_weights_are_the_filter_s_map_averaged_or_not():
    mha = nn.MultiheadAttention(E, H, batch_first=True).double().eval()
    x = torch.randn(B, N, E).double()
    _, attention = mha(x, x, x, average_attn_weights=False)
    gfsa.plug(mha, filter=gfsa.Twicing)
    twicing = 2 * attention - attention @ attention
    torch.testing.assert_close(mha(x, x, x, average_attn_weights=False)[1], twicing)
    torch.testing.assert_close(mha(x, x, x)[1], twicing.mean(1))


def test_a_row_without_keys_is_c0_v_with_weights_and_without():
    mha = nn.MultiheadAttention(E, H, batch_first=True).eval()
    gfsa.plug(mha, w0=0.5)
    x = torch.randn(1, N, E)
    padding = torch.ones(1, N, dtype=torch.bool)
    v = nn.functional.linear(x, mha.in_proj_weight.chunk(3)[2], mha.in_proj_bias.chunk(3)[2])
    expected = mha.out_proj(0.5 * v)
    for need_weights in (True, False):
        got, _ = mha(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        torch.testing.assert_close(got, expected)


def test_extra_keys_are_refused_with_the_reason():
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match=f"{option} adds a key"):
            gfsa.plug(nn.MultiheadAttention(E, H, **{option: True}))


@pytest.mark.parametrize("width", [E - 1, E + 1, 2 * E])
def test_keys_of_another_width_are_other_tokens(width):
    with pytest.raises(ValueError, match=f"its keys have {width} features and its queries {E}"):
        gfsa.plug(nn.MultiheadAttention(E, H, kdim=width))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("shape", [(0, 5, E), (3, 0, E), (0, 0, E), (0, E)])
def test_no_sample_or_no_token(shape, batch_first, training, need_weights):
    mha = nn.MultiheadAttention(E, H, batch_first=batch_first).train(training)
    plugged = copy.deepcopy(mha)
    gfsa.plug(plugged)
    disturb(plugged)
    x = torch.randn(shape, requires_grad=True)
    length = shape[-2] if batch_first or len(shape) == 2 else shape[0]
    # torch itself fails on a mask for each head
    per_head = torch.zeros(x[..., 0].numel() // max(length, 1) * H, length, length).bool()
    for mask in (None, torch.zeros(length, length).bool()):
        expected, weights = mha(x, x, x, attn_mask=mask, need_weights=need_weights)
        got, filtered = plugged(x, x, x, attn_mask=mask, need_weights=need_weights)
        assert got.shape == expected.shape
        assert (filtered is None) == (weights is None)
    if len(shape) == 3 and length:
        got, _ = plugged(x, x, x, attn_mask=per_head, need_weights=need_weights)
    got.sum().backward()
    assert x.grad.shape == x.shape


def test_self_attention_by_views_and_equal_copies_but_not_other_tokens():
    mha = nn.MultiheadAttention(E, H).eval()
    gfsa.plug(mha, wK=0.2)
    x = torch.randn(N, B, E)
    expected, _ = mha(x, x, x)
    for key in (x.view(N, B, E), x.clone()):
        torch.testing.assert_close(mha(x, key, key)[0], expected)
    # positions on queries and keys, none on values
    assert mha(x, x, torch.randn(N, B, E))[0].shape == x.shape
    with pytest.raises(ValueError, match=r"^Multihead.*other values than its query.*layers="):
        mha(x, x + 1, x + 1)
    with pytest.raises(ValueError, match=r"query has shape \(7, 3, 16\) and key \(5, 3, 16\)"):
        mha(x, x[:5], x[:5])


def test_masks_of_other_shapes_are_refused():
    mha = nn.MultiheadAttention(E, H, batch_first=True).eval()
    gfsa.plug(mha)
    x = torch.randn(B, N, E)
    with pytest.raises(ValueError, match=r"attn_mask of shape \(7, 7\), or \(12, 7, 7\)"):
        mha(x, x, x, attn_mask=torch.zeros(5, N, N))
    with pytest.raises(ValueError, match=r"key_padding_mask of shape \(3, 7\)"):
        mha(x, x, x, key_padding_mask=torch.zeros(N, B, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="is_causal is a hint about attn_mask"):
        mha(x, x, x, is_causal=True)


def test_a_subclass_with_a_forward_of_its_own_is_not_taken_over():
    class Other(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    with pytest.raises(ValueError, match="register an adapter"):
        gfsa.plug(Other(E, H))


class Doubled(nn.Module):
    """A parametrisation: the weight that the layer uses is twice the one that is learned."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_a_layer_is_plugged_first_and_parametrised_then():
    x = torch.randn(B, N, E, dtype=torch.float64)
    model = nn.MultiheadAttention(E, H, batch_first=True).double()
    gfsa.plug(model)
    disturb(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.in_proj_weight *= 2
    parametrize.register_parametrization(model, "in_proj_weight", Doubled())
    assert torch.allclose(model(x, x, x)[0], other(x, x, x)[0], atol=1e-12)
    with pytest.raises(ValueError, match="remove_parametrizations"):
        gfsa.unplug(model)
    assert torch.allclose(model(x, x, x)[0], other(x, x, x)[0], atol=1e-12)
    parametrize.remove_parametrizations(model, "in_proj_weight")
    gfsa.unplug(model)
    gfsa.unplug(other)
    assert type(model) is nn.MultiheadAttention
    assert torch.allclose(model(x, x, x)[0], other(x, x, x)[0], atol=1e-12)
    parametrize.register_parametrization(model, "in_proj_weight", Doubled())
    with pytest.raises(ValueError, match="plug first, then parametrize"):
        gfsa.plug(model)


def encoder(batch_first: bool = True) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, H, 32, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)


def test_encoder(tmp_path):
    x = torch.randn(B, N, E)

    def run(model: nn.Module) -> Tensor:
        return model(x.to(model.layers[0].linear1.weight.dtype))

    report = check_backbone(encoder, run, tmp_path)
    assert report.plugged == {"layers.0.self_attn": 4, "layers.1.self_attn": 4}


def test_neither_fast_path_goes_past_the_filter():
    x, padding = torch.randn(B, N, E), padding_of("bool")
    for options in ({}, {"src_key_padding_mask": padding}):
        model = encoder().eval()
        with torch.no_grad():
            expected = model(x, **options)  # by the C++ kernels, packed if there is padding
            gfsa.plug(model)
            # only the order of sums differs
            torch.testing.assert_close(model(x, **options), expected, rtol=0, atol=1e-6)
            disturb(model)
            filtered = model(x, **options)
        assert (filtered - expected).abs().max() > 1e-3
        # the same with gradients, where torch takes no fast path
        taken = ~padding if options else slice(None)
        torch.testing.assert_close(model(x, **options)[taken], filtered[taken])
        gfsa.unplug(model)
        with torch.no_grad():
            assert torch.equal(model(x, **options), expected), "the fast path is back"


def test_transformer_leaves_cross_attention_alone(tmp_path):
    source, target = torch.randn(5, B, E), torch.randn(N, B, E)
    causal = nn.Transformer.generate_square_subsequent_mask(N)

    def run(model: nn.Module) -> Tensor:
        kind = next(model.parameters()).dtype
        return model(source.to(kind), target.to(kind), tgt_mask=causal.to(kind), tgt_is_causal=True)

    report = check_backbone(lambda: nn.Transformer(E, H, 2, 2, 32), run, tmp_path)
    assert list(report.plugged) == [
        f"{part}.layers.{i}.self_attn" for part in ("encoder", "decoder") for i in range(2)
    ]
    assert set(report.skipped) == {f"decoder.layers.{i}.multihead_attn" for i in range(2)}


def test_compiles_into_one_graph():
    x, padding = torch.randn(B, N, E), padding_of("bool")
    model = encoder().eval()
    gfsa.plug(model, wK=0.2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for options in ({}, {"src_key_padding_mask": padding}):
        torch.testing.assert_close(compiled(x, **options), model(x, **options))
    assert isinstance(model.layers[0].self_attn, FilteredMultiheadAttention)


class _Attends(nn.Module):
    """Gives its attention a query and a key as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, query, key):
        return self.mha(query, key, key, need_weights=False)[0]


def _attends():
    model = _Attends().eval()
    gfsa.plug(model, wK=0.2)
    return model, torch.randn(B, N, E)


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_cross_attention_of_equal_length_is_refused(whole):
    model, x = _attends()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=whole)
    with pytest.raises(Exception, match="cannot be compared while a graph is compiled"):
        compiled(x, torch.randn_like(x))
    with pytest.raises(Exception, match="cannot be compared while a graph is compiled"):
        torch.export.export(model, (x, torch.randn_like(x)))


def test_attention_exported_alone_with_one_tensor_warns():
    mha = nn.MultiheadAttention(E, H, batch_first=True).eval()
    gfsa.plug(mha)
    x = torch.randn(B, N, E)
    with pytest.warns(UserWarning, match=r"Trace or export a module whose forward takes x and c"):
        torch.export.export(mha, (x, x, x))
    with pytest.warns(UserWarning, match=r"Trace or export a module whose forward takes x and c"):
        torch.jit.trace(mha, (x, x, x))
    # a module of one input has nothing to be warned of
    encoder = nn.TransformerEncoderLayer(E, H, 8, batch_first=True).eval()
    gfsa.plug(encoder)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this nn.MultiheadAttention")
        torch.export.export(encoder, (x,))


def test_fx_needs_plugged_attention_as_a_leaf():
    """As which it takes torch's own class, and none that extends it."""
    x = torch.randn(B, N, E)
    around = nn.Sequential(_OfOneTensor(nn.MultiheadAttention(E, H, batch_first=True)))
    torch.fx.symbolic_trace(around)
    gfsa.plug(around, wK=0.2)
    with pytest.raises(TypeError, match=r"query must be .* got Proxy; torch\.fx .* a leaf"):
        torch.fx.symbolic_trace(around)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return hasattr(module, "gfsa") or super().is_leaf_module(module, name)

    traced = torch.fx.GraphModule(around, Tracer().trace(around))
    assert torch.equal(traced(x), around(x))


class _OfOneTensor(nn.Module):
    def __init__(self, mha: nn.MultiheadAttention) -> None:
        super().__init__()
        self.mha = mha

    def forward(self, x: Tensor) -> Tensor:
        return self.mha(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("copies_before", [False, True])
def test_copies_and_other_tokens_under_torch_func(copies_before):
    """Their values are compared as outside of it, whatever an earlier forward has shown."""
    model, x = _attends()
    numbers = dict(model.named_parameters())
    if copies_before:
        model(x, x.clone())

    def loss(numbers, query, key):
        given = (query[None], key[None].clone())
        return torch.func.functional_call(model, numbers, given).sum()

    gradient = torch.func.grad(loss)
    found = torch.vmap(gradient, (None, 0, 0))(numbers, x, x)["mha.gfsa.theta"]
    turned = torch.vmap(gradient, (None, 0, 1))(numbers, x, x.transpose(0, 1).contiguous())
    assert torch.equal(turned["mha.gfsa.theta"], found)
    for one, of_sample in zip(x, found, strict=True):
        torch.testing.assert_close(of_sample, gradient(numbers, one, one)["mha.gfsa.theta"])
    for maps in (torch.vmap(gradient, (None, 0, 0)), torch.vmap(loss, (None, 0, 0)), loss):
        with pytest.raises(ValueError, match="its key has other values than its query"):
            maps(numbers, x, torch.randn_like(x))
    # one key for all samples, whose queries are the same or not
    torch.vmap(gradient, (None, 0, None))(numbers, x[:1].expand_as(x), x[0])
    with pytest.raises(ValueError, match="its key has other values than its query"):
        torch.vmap(gradient, (None, 0, None))(numbers, x, x[0])


def test_copies_where_operations_are_recorded():
    model, x = _attends()
    expected = model(x, x.clone())
    one = torch.vmap(lambda x: model(x[None], x[None].clone())[0])
    for function in (lambda x: model(x, x.clone()), one, torch.func.functionalize(one)):
        recorded = make_fx(function)(x)
        torch.testing.assert_close(recorded(x), expected)
