"""Comparison methods: applied, as filters, and in compiled, checkpointed or threaded models."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gfsa
from gfsa.operators.visibility import Visibility
from gfsa_experiments import baselines
from gfsa_experiments.baselines import blocks
from gfsa_experiments.baselines.blocks import Reader
from support.families import FAMILIES, METHODS
from support.small_baselines import IDS, apply, bert, encoder


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("contra_norm", {}, r"the methods are .*Did you mean 'contranorm'\?"),
        ("twicing", {}, r"there is no method 'twicing'; .*gfsa\.plug\(model, …\) takes filters"),
        (None, {}, "there is no method None"),
        ("contranorm", {"tau": 1.0}, "has no option tau; it has scale=0.01, form='bert'"),
        ("featscale", {"dim": 3}, "has no option dim; it has none"),
        ("contranorm", {"form": "gnn"}, "form must be one of"),
        ("contranorm", {"scale": -0.1}, "scale must be a finite number of at least 0, got -0.1"),
        ("contranorm", {"temperature": 0}, "temperature must be a finite number above 0"),
        ("contranorm", {"scale": "0.1"}, "scale must be a finite number"),
        ("neutreno", {"alpha": float("nan")}, "alpha must be a finite number"),
        ("layerscale", {"init": True}, "init must be a finite number, got True"),
        ("attnscale", {"lr_multiplier": 0}, "lr_multiplier must be a positive number"),
        ("featscale", {"layers": "some"}, "layers must be"),
        ("layerscale", {"layers": [3]}, "there is no layer 3"),
    ],
)
def test_bad_names_and_options(name: Any, options: dict, message: str) -> None:
    model = encoder()
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=message):
        baselines.apply(model, name, **options)
    assert list(model.state_dict()) == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_where_nothing_fits() -> None:
    with pytest.raises(
        ValueError, match=r"layerscale cannot be applied to Linear; it can be applied to "
    ):
        baselines.apply(nn.Linear(2, 2), "layerscale")
    with pytest.raises(TypeError, match="expected a model"):
        baselines.apply("bert", "layerscale")
    with pytest.raises(ValueError, match="no method to remove"):
        baselines.remove(encoder())
    assert baselines.parameters_of(encoder()) == []


def test_one_method_at_a_time() -> None:
    model = encoder()
    baselines.apply(model, "layerscale", layers=[1])
    with pytest.raises(ValueError, match="has a method applied already"):
        baselines.apply(model, "layerscale", layers=[2])
    baselines.remove(model)
    gfsa.plug(model)
    with pytest.raises(ValueError, match="is plugged already"):
        baselines.apply(model, "attnscale")
    # beside filters, a method that acts elsewhere is fine, and leaves alone
    baselines.apply(model, "layerscale")
    baselines.remove(model)
    assert len(gfsa.filters_of(model)) == 2


def test_unplugged_by_the_other_door() -> None:
    model = encoder()
    apply(model, "attnscale")
    gfsa.unplug(model)
    model(IDS % 9)
    baselines.remove(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_block_with_a_forward_of_its_own_is_not_taken_for_a_known_one() -> None:
    class Mine(nn.TransformerEncoderLayer):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(ValueError, match="cannot be applied to"):
        baselines.apply(Mine(12, 3), "layerscale")


def test_report() -> None:
    report = baselines.apply(bert(), "layerscale", layers="even")
    assert str(report).splitlines() == [
        "layerscale in 1 layers, 24 learned numbers (1 skipped)",
        "    1  encoder.layer.1: output of attention.output.dense, output of output.dense",
        "    -  encoder.layer.0: not among the selected layers",
    ]


def test_ordinary_attention_to_the_bit() -> None:
    for name in ("BERT", "GPT-2", "DeiT", "our blocks"):
        family = FAMILIES[name]()
        model = family.model() if name == "DeiT" else family.model().float()
        for method in ("attnscale", "featscale"):
            with torch.no_grad():
                plain = family.run(model, [0, 1])
                baselines.apply(model, method)
                start = family.run(model, [0, 1])
            baselines.remove(model)
            assert all(torch.equal(a, b) for a, b in zip(plain, start, strict=True))


def test_parts_of_a_block_by_themselves_are_refused() -> None:
    model = encoder()
    apply(model, "contranorm")
    with pytest.raises(RuntimeError, match=r"a part of blocks\.1 ran outside of the block"):
        model.blocks[1].mlp_norm(torch.randn(2, 7, 12))


def test_a_place_that_is_passed_by_is_an_error() -> None:
    model = bert()
    apply(model, "layerscale")
    model.encoder.layer[1].output.dense = nn.Linear(20, 12)
    with pytest.raises(RuntimeError, match=r"encoder\.layer\.1 ran, but .* 1 of 2 places"):
        model(IDS)


@torch.no_grad()
def test_tokens_have_to_stay_together() -> None:
    model = bert(chunk_size_feed_forward=1).eval()
    apply(model, "contranorm-vit")
    with pytest.raises(RuntimeError, match=r"called with 14 tokens, but processes 2 at a time"):
        model(IDS)
    baselines.remove(model)
    # what acts on each token by itself does not mind
    apply(model, "layerscale")
    chunked = model(IDS).last_hidden_state
    for block in model.encoder.layer:
        block.chunk_size_feed_forward = 0
    assert torch.allclose(chunked, model(IDS).last_hidden_state, atol=1e-6, rtol=0)


def test_masks_that_cannot_be_read_are_refused() -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True).eval()
    apply(layer, "featscale")
    nested = torch.nested.nested_tensor([torch.randn(3, 12), torch.randn(2, 12)])
    with pytest.raises(TypeError, match="pad the batch"):
        layer(nested)
    reader = Reader(layer, layer.self_attn)
    with pytest.raises(TypeError, match="a mask memory_mask, which cannot be read"):
        reader((torch.randn(2, 3, 12),), {"memory_mask": torch.zeros(3, 3)})
    with pytest.raises(ValueError, match="the masks of a _Foreign cannot be read"):
        Reader(_Foreign(), layer.self_attn)


class _Foreign(nn.Module):
    """A module of no library."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@torch.no_grad()
def test_attention_maps_that_are_asked_for() -> None:
    model = bert(attn_implementation="eager").double().eval()
    plain = model(IDS, output_attentions=True).attentions
    baselines.apply(model, "neutreno")
    assert torch.equal(model(IDS, output_attentions=True).attentions[0], plain[0])
    baselines.remove(model)
    # a ready-made map does not say which of its entries are masked
    baselines.apply(model, "attnscale")
    with pytest.raises(TypeError, match="attn_implementation='sdpa'"):
        model(IDS)


class OwnBlock(nn.Module):
    """A pre-norm block of one's own around torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.mix(y, y, y, need_weights=False)[0]


def test_a_block_of_ones_own_is_registered(monkeypatch) -> None:
    monkeypatch.setattr(blocks, "_registered", dict(blocks._registered))
    model, x = nn.Sequential(OwnBlock(), OwnBlock()), torch.randn(2, 5, 8)
    expected = model(x)
    with pytest.raises(ValueError, match="cannot be applied to Sequential"):
        baselines.apply(model, "layerscale", init=0.5)
    anatomy = baselines.Anatomy("mix", {"attention": baselines.Place("mix")}, ("norm",))
    baselines.register_block(OwnBlock, anatomy)
    report = baselines.apply(model, "layerscale", init=0.5, layers=[2])
    assert report.plugged == {"1": "output of mix"}
    half = model[0](x)
    torch.testing.assert_close(model(x), half + 0.5 * (_bare(model[1])(half) - half))
    baselines.remove(model)
    assert torch.equal(model(x), expected)
    with pytest.raises(TypeError, match=r"expected a gfsa\.baselines\.Anatomy"):
        baselines.register_block(OwnBlock, "mix")
    with pytest.raises(TypeError, match=r"expected an nn\.Module class"):
        baselines.register_block(model, anatomy)


def _bare(block: OwnBlock) -> OwnBlock:
    """A block with the same weights and without the method."""
    bare = OwnBlock()
    bare.load_state_dict(block.state_dict(), strict=False)
    return bare


class TestAsFilters:
    """``gfsa.plug(model, filter=…)`` for the methods that act on the map."""

    @torch.no_grad()
    def test_attnscale_reads_masks_from_the_operator(self) -> None:
        model = bert().double().eval()
        mask = torch.ones_like(IDS)
        mask[1, 4:] = 0
        outputs = []
        for put in ("apply", "plug"):
            torch.manual_seed(0)
            if put == "apply":
                apply(model, "attnscale")
            else:
                gfsa.plug(model, filter=baselines.AttnScale)
                for parameter in baselines.parameters_of(model):
                    parameter.add_(torch.randn_like(parameter) * 0.5)
            outputs.append(model(IDS, attention_mask=mask).last_hidden_state[mask.bool()])
            baselines.remove(model)
        # a plugged layer reads one row of padding, not a mask of all queries: other sums
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-14)

    def test_dropout_acts_on_the_map(self) -> None:
        model = encoder()
        gfsa.plug(model, filter=baselines.AttnScale, dropout_after="filter")
        with pytest.raises(ValueError, match="dropout_after='attention'"):
            model(IDS % 9)

    def test_neutreno_needs_the_first_layers_values(self) -> None:
        model = encoder()
        gfsa.plug(model, filter=baselines.NeuTRENO)
        with pytest.raises(RuntimeError, match=r"baselines\.apply\(model, 'neutreno'\)"):
            model(IDS % 9)

    @pytest.mark.parametrize("kind", [baselines.AttnScale, baselines.NeuTRENO])
    def test_they_are_no_polynomials(self, kind: Any) -> None:
        with pytest.raises(TypeError, match="not a polynomial of the attention map"):
            kind(3).coefficients()
        with pytest.raises(TypeError, match="not a polynomial of the attention map"):
            kind(3).fold()


class TestNeuTRENO:
    def test_a_stack_of_one_layer_is_refused(self) -> None:
        model = encoder(1)
        with pytest.raises(ValueError, match="one filtered layer"):
            baselines.apply(model, "neutreno")
        assert not gfsa.filters_of(model)

    @torch.no_grad()
    def test_the_first_layer_is_the_source_although_it_was_not_chosen(self) -> None:
        model = encoder(3)
        plain = model(IDS % 9)
        report = baselines.apply(model, "neutreno", layers=[3], alpha=0.5)
        assert list(report.plugged.values()) == ["the source of v⁰", "its attention's output"]
        changed = model(IDS % 9)
        assert not torch.equal(changed, plain)
        model(torch.flip(IDS % 9, [0]))
        assert torch.equal(model(IDS % 9), changed), "each forward has values of its own"

    def test_a_layer_by_itself_is_refused(self) -> None:
        model = encoder()
        baselines.apply(model, "neutreno")
        for _ in range(2):
            with pytest.raises(ValueError, match="has not run in this forward"):
                model.blocks[1](torch.randn(1, 4, 12))
            model(IDS % 9)

    def test_gradients_reach_the_first_layer_through_its_values(self) -> None:
        torch.manual_seed(0)
        model = encoder().double()
        before = _gradient_of_values(model)
        baselines.apply(model, "neutreno")
        assert not torch.equal(_gradient_of_values(model), before)


def _gradient_of_values(model: Any) -> Tensor:
    model.zero_grad()
    model(IDS % 9).sum().backward()
    return model.blocks[0].attention.qkv.weight.grad[24:].clone()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_gradient_checkpointing(method: str, reentrant: bool) -> None:
    model = bert().train()
    apply(model, method)
    mask = torch.ones_like(IDS)
    mask[1, 4:] = 0

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(IDS, attention_mask=mask).last_hidden_state.pow(2)[mask.bool()].sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if method == "neutreno" and reentrant:
        with pytest.raises(ValueError, match="use_reentrant=False"):
            gradients()
        return
    again = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_compiled_in_one_graph(method: str) -> None:
    model = encoder().eval()
    apply(model, method)
    ids = IDS % 9
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    expected = {mask: model(ids, mask) for mask in (padding, None)}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for mask, y in expected.items():
        assert torch.equal(compiled(ids, mask), y)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(compiled(ids, padding), expected[padding]), "compiled once for all"


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_nothing_waits_for_the_device(method: str) -> None:
    # tensors without numbers: reading one on the host, which no captured graph may do, raises
    model = encoder()
    apply(model, method)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ids = mode.from_tensor(IDS % 9)
        padding = torch.zeros(2, 7, dtype=torch.bool)
        assert model(ids, padding).shape == (2, 5)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 20, batch_first=True), 2)
    apply(model, method)
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = model(torch.randn(2, 7, 12), src_key_padding_mask=torch.zeros(2, 7, dtype=torch.bool))
        assert y.shape == (2, 7, 12)


@pytest.mark.parametrize("method", METHODS)
def test_half_precision(method: str) -> None:
    model = encoder().eval()
    apply(model, method)
    ids = IDS % 9
    with torch.no_grad():
        exact = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(ids)
    y.float().sum().backward()
    for parameter in baselines.parameters_of(model):
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
    # bfloat16 keeps eight bits
    assert (y.float() - exact).abs().max() <= 0.05 * exact.abs().max()
    whole = encoder().bfloat16().eval()
    apply(whole, method)
    assert all(p.dtype == torch.float32 for p in baselines.parameters_of(whole))
    with torch.no_grad():
        got = whole(ids)
    assert got.dtype == torch.bfloat16
    assert got.isfinite().all()


@torch.no_grad()
def test_a_small_scale_is_not_lost_in_bfloat16() -> None:
    x = torch.randn(2, 6, 12)
    pushed = baselines.ContraNorm(0.005)
    exact = pushed(x.bfloat16().double(), Visibility())
    got = pushed(x.bfloat16(), Visibility()).double()
    # one rounding at the end
    assert ((got - exact).abs() <= exact.abs() * 2.0**-8 + 1e-4).all()


@pytest.mark.parametrize("method", METHODS)
def test_threads_do_not_see_each_other(method: str) -> None:
    model = bert().eval()
    apply(model, method)

    @torch.no_grad()
    def run(number: int) -> Tensor:
        mask = torch.ones_like(IDS)
        mask[1, 3 + number :] = 0
        return model(IDS.roll(number, 1), attention_mask=mask).last_hidden_state

    expected = [run(number) for number in range(4)]
    wrong: list[int] = []
    start = threading.Barrier(len(expected))

    def work(number: int) -> None:
        start.wait()
        for _ in range(8):
            try:
                # sums of padded tokens are rounded by where they lie in memory
                same = torch.allclose(run(number), expected[number], atol=1e-5)
                wrong.extend([] if same else [number])
            except RuntimeError:
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(expected))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_a_forward_that_broke_off_leaves_nothing_behind(method: str) -> None:
    model = encoder(3)
    apply(model, method)
    ids, other = IDS % 9, IDS.flip(1) % 9
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    expected = model(ids)
    broken = model.blocks[1].mlp[0].register_forward_pre_hook(_break_off)
    with pytest.raises(KeyboardInterrupt):
        model(other, padding)
    broken.remove()
    assert torch.equal(model(ids), expected)


def _break_off(module: nn.Module, args: Any) -> None:
    raise KeyboardInterrupt
