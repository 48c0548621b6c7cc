"""``plugs.sites``: every attention module of a model, with its filter or its refusal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gfsa
from gfsa.plugs import sites
from gfsa.plugs.sites import accepting_sites, plugged_sites
from support.tiny import TinyEncoder


class Unseen(nn.Module):
    """Attention that no adapter knows."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)


def decoder() -> nn.Module:
    return nn.TransformerDecoderLayer(8, 2, 8, batch_first=True)


def test_self_attention_accepts_and_cross_attention_refuses() -> None:
    found = sites(decoder())
    assert list(found) == ["self_attn", "multihead_attn"]
    assert found["self_attn"].refusal is None
    assert found["self_attn"].num_heads == 2
    assert "cross-attention" in found["multihead_attn"].refusal
    assert not any(site.is_plugged for site in found.values())


def test_asking_changes_nothing() -> None:
    model = TinyEncoder()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    sites(model, unknown="trace")
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


def test_plugged_sites_have_their_filter() -> None:
    model = TinyEncoder()
    gfsa.plug(model, layers=[2])
    found = sites(model)
    assert [site.is_plugged for site in found.values()] == [False, True, False]
    assert list(plugged_sites(model)) == ["blocks.1.attention"]
    site = found["blocks.1.attention"]
    assert site.filter is gfsa.filters_of(model)[site.name]
    assert site.refusal is None
    with pytest.raises(ValueError, match=r"blocks\.0\.attention has no filter"):
        found["blocks.0.attention"].filter  # noqa: B018


def test_a_site_is_a_record_of_when_it_was_found() -> None:
    model = TinyEncoder()
    gfsa.plug(model)
    site = plugged_sites(model)["blocks.0.attention"]
    old = site.filter
    gfsa.unplug(model)
    assert site.filter is old
    assert plugged_sites(model) == {}


def test_unknown_attention_is_refused_or_traced() -> None:
    model = nn.Sequential(Unseen())
    assert "no adapter knows Unseen" in sites(model)["0"].refusal
    assert sites(model, unknown="trace")["0"].refusal is None
    assert sites(model, unknown="trace")["0"].num_heads == 2


@pytest.mark.parametrize("unknown", ["refuse", "trace"])
def test_a_filter_is_no_site_whatever_its_name(unknown: str) -> None:
    model = TinyEncoder()
    gfsa.baselines.apply(model.blocks[0].attention, "neutreno")
    gfsa.plug(model.blocks[1], filter=gfsa.baselines.AttnScale)
    assert list(sites(model, unknown)) == [f"blocks.{i}.attention" for i in range(3)]


def test_no_site_that_accepts_is_an_error_with_all_refusals() -> None:
    model = nn.ModuleDict({"a": decoder().multihead_attn, "b": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"found no self-attention in Linear"):
        accepting_sites(model["b"], sites(model["b"]))
    with pytest.raises(ValueError, match=r"is refused:\n  0: no adapter knows Unseen"):
        accepting_sites(nn.Sequential(Unseen()), sites(nn.Sequential(Unseen())))
    assert list(accepting_sites(model, sites(model))) == ["a"]


def test_only_models_have_sites() -> None:
    with pytest.raises(TypeError, match=r"expected a model \(an nn\.Module\), got Tensor"):
        sites(torch.zeros(2))
