"""How the comparison methods behave: names, options, reports, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gfsa
from gfsa_experiments import baselines
from gfsa_experiments.baselines import blocks
from gfsa_experiments.baselines.masks import Reader
from support.families import FAMILIES
from support.small_baselines import IDS, LEARNING, apply, bert, encoder


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("contra_norm", {}, r"the methods are .*Did you mean 'contranorm'\?"),
        ("twicing", {}, r"a filter of the attention map: gfsa\.plug\(model, filter=gfsa\.Twicing"),
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


@pytest.mark.parametrize("method", ["attnscale", "neutreno"])
def test_unplugged_by_the_other_door(method: str) -> None:
    model = encoder()
    apply(model, method)
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
    for name in ("BERT", "GPT-2", "DeiT", "Swin", "Encoder"):
        family = FAMILIES[name]()
        model = family.model().float() if name in ("BERT", "GPT-2", "Encoder") else family.model()
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
    reader = Reader(layer, layer.self_attn, whole=True)
    with pytest.raises(TypeError, match="a mask memory_mask, which cannot be read"):
        reader((torch.randn(2, 3, 12),), {"memory_mask": torch.zeros(3, 3)})
    with pytest.raises(ValueError, match="the masks of a _Foreign cannot be read"):
        Reader(_Foreign(), layer.self_attn, whole=True)


class _Foreign(nn.Module):
    """A module of no library."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@torch.no_grad()
def test_attention_maps_that_are_asked_for() -> None:
    model = bert(attn_implementation="eager").double().eval()
    plain = model(IDS, output_attentions=True).attentions
    apply(model, "attnscale")
    scaled = model(IDS, output_attentions=True).attentions
    scale = model.encoder.layer[0].attention.self.gfsa.theta[..., None]
    mean = torch.full((7, 7), 1 / 7, dtype=torch.float64)
    assert torch.allclose(scaled[0], mean + (1 + scale) * (plain[0] - mean), atol=1e-12, rtol=0)
    baselines.remove(model)
    baselines.apply(model, "neutreno")
    assert torch.equal(model(IDS, output_attentions=True).attentions[0], plain[0])


def test_an_optimiser_group_of_their_own() -> None:
    model = bert().train()
    for method in LEARNING:
        apply(model, method)
        theirs = baselines.parameters_of(model)
        assert {id(p) for p in theirs} < {id(p) for p in model.parameters()}
        optimizer = torch.optim.SGD([{"params": theirs, "lr": 0.1}])
        before = [p.detach().clone() for p in theirs]
        model(IDS).last_hidden_state.pow(2)[..., 0].sum().backward()
        optimizer.step()
        assert all(not torch.equal(a, b) for a, b in zip(before, theirs, strict=True))
        baselines.remove(model)


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
