"""Masks in the comparison methods: causal maps, padding, masks, caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gfsa
from gfsa_experiments import baselines
from gfsa_experiments.baselines.blocks import visible
from support.families import FAMILIES, METHODS
from support.small_baselines import IDS, apply, causal_lm


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_nothing_is_seen_of_the_future(method: str, implementation: str) -> None:
    model = causal_lm(implementation)
    apply(model, method)
    if (method, implementation) == ("attnscale", "eager"):
        # a ready-made map does not say which of its entries are masked
        with pytest.raises(TypeError, match="which a ready-made attention map"):
            model(IDS)
        return
    other = IDS.clone()
    other[:, 4:] = 5
    for mask in (None, torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1] * 7])):
        before = model(IDS, attention_mask=mask).logits
        after = model(other, attention_mask=mask).logits
        assert torch.equal(before[1, :4], after[1, :4])
        assert not torch.equal(before[1, 4:], after[1, 4:])


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_causal_masks_of_torch_and_timm(method: str) -> None:
    import timm

    x = torch.randn(2, 6, 12, dtype=torch.float64)
    later = x.clone()
    later[:, 3:] = 1.0
    blocked = torch.ones(6, 6, dtype=torch.bool).triu(1)
    torch_layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(torch_layer, 2).double().eval()
    blocks = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=12, depth=2, num_heads=3
    )
    vit = blocks.double().eval()

    def images(x: Tensor, **mask: Any) -> Tensor:
        # the blocks alone: what comes before them has no order
        with torch.no_grad():
            for block in vit.blocks:
                x = block(x, **mask)
        return x

    apply(encoder, method)
    runs = [
        lambda x: encoder(x, mask=blocked),
        lambda x: encoder(x, mask=blocked, is_causal=True),
        lambda x: encoder(x, mask=torch.zeros(6, 6).masked_fill(blocked, -torch.inf).double()),
    ]
    if method != "neutreno":
        # its first values belong to a forward of the whole model
        apply(vit, method)
        runs += [lambda x: images(x, is_causal=True), lambda x: images(x, attn_mask=~blocked)]
    for run in runs:
        assert torch.equal(run(x)[:, :3], run(later)[:, :3])


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_padded_batches_that_torch_would_pack(method: str) -> None:
    # in evaluation, and with an even number of heads
    layer = nn.TransformerEncoderLayer(12, 4, 20, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    assert model.use_nested_tensor
    apply(model, method)
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    together = model(x, src_key_padding_mask=padding)
    assert (together[0] - model(x[:1])[0]).abs().max() <= 1e-12
    assert (together[1, :4] - model(x[1:, :4])[0]).abs().max() <= 1e-12
    baselines.remove(model)
    assert model.use_nested_tensor


@torch.no_grad()
def test_masks_for_each_head() -> None:
    family = FAMILIES["torch, norms last"]()
    model = family.model()
    apply(model, "attnscale")
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    per_head = padding[:, None, None, :].expand(2, 3, 5, 5).reshape(6, 5, 5)
    by_head = model(x, mask=per_head)
    by_key = model(x, src_key_padding_mask=padding)
    assert (by_head - by_key).abs().max() <= 1e-10


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("method", ["attnscale", "layerscale", "neutreno"])
def test_decoding_with_a_cache_is_decoding_without(method: str, options: dict) -> None:
    model = causal_lm()
    apply(model, method)
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    how |= {"return_dict_in_generate": True, "attention_mask": torch.ones_like(IDS)}
    how["attention_mask"][1, :2] = 0
    slow = model.generate(IDS, use_cache=False, **how)
    fast = model.generate(IDS, **options, **how)
    assert torch.equal(slow.sequences, fast.sequences)
    for a, b in zip(slow.logits, fast.logits, strict=True):
        assert (a - b).abs().max() <= 2e-5


@pytest.mark.parametrize("method", ["contranorm", "featscale"])
def test_a_cache_has_no_tokens_to_look_at(method: str) -> None:
    model = causal_lm()
    apply(model, method)
    how = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(IDS, **how)
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(IDS, cache_implementation="static", **how)
    assert model.generate(IDS, use_cache=False, **how).shape == (2, 9)


@pytest.mark.parametrize(
    ("method", "filtered"),
    [
        *((method, False) for method in METHODS),
        # the others are filters of their own
        *((method, True) for method in ("contranorm", "contranorm-vit", "featscale", "layerscale")),
    ],
)
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(method: str, filtered: bool) -> None:
    """Whether transformers writes their mask, or describes it to a plugged model."""
    model = causal_lm().double()
    if filtered:
        gfsa.plug(model)
    apply(model, method)
    positions = torch.tensor([[*range(3), *range(4)]])
    packed = model(IDS[:1], position_ids=positions, use_cache=False).logits
    alone = model(IDS[:1, 3:], use_cache=False).logits
    assert (packed[:, 3:] - alone).abs().max() <= 1e-10


def test_pairs_with_a_batch_dimension_beside_padding_and_causality() -> None:
    samples, tokens = 3, 5
    pairs = (torch.rand(samples, tokens, tokens) < 0.5) | torch.eye(tokens, dtype=torch.bool)
    keys = torch.ones(samples, tokens, dtype=torch.bool)
    keys[0, 0] = False
    seen = visible(pairs, keys, causal=True)
    expected = pairs & keys[:, None] & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    assert seen.pairs is not None
    assert torch.equal(seen.pairs[:, 0], expected)
