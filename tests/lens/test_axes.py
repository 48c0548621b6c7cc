"""The lens measures along the axis of tokens, or leaves a layer out and says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gfsa
from gfsa.lens import diagnose, measure
from support.lens import SMALL_PAIR, diagnosed, only
from support.tiny import TinyAttention, TinyBlock

IN_DOUBT = "do not show which axis"


def similar(tokens: Tensor) -> Any:
    return pytest.approx(measure.cosine_similarity(tokens).mean().item(), abs=1e-5)


class Blocks(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class OnGrid(nn.Module):
    """A residual block on images ``(B, D, H, W)`` or ``(B, H, W, D)``."""

    def __init__(self, features_first: bool, stride: int = 1) -> None:
        super().__init__()
        self.features_first = features_first
        self.stride = stride
        self.attention = TinyAttention(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT if self.features_first else x.flatten(1, 2)
        y = self.attention(tokens)
        x = x + (y.mT if self.features_first else y).reshape(x.shape)
        return F.avg_pool2d(x, self.stride) if self.stride > 1 else x


class TurnsAround(nn.Module):
    """Batch first around an attention that is sequence first, as SpeechBrain's layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        return x + self.attention(y, y, y, need_weights=False)[0].transpose(0, 1)


@pytest.mark.parametrize("features_first", [False, True])
def test_grids(features_first: bool) -> None:
    model = Blocks(OnGrid(features_first)).eval()
    x = torch.randn(2, 16, 3, 4) if features_first else torch.randn(2, 3, 4, 16)
    with torch.no_grad():
        y = model(x)
    tokens = [grid.flatten(2).mT if features_first else grid.flatten(1, 2) for grid in (x, y)]
    assert diagnosed(model, x) == {0: similar(tokens[0]), 1: similar(tokens[1])}


def test_a_block_that_leaves_another_grid_than_it_attends_to() -> None:
    model = Blocks(OnGrid(features_first=True, stride=2), OnGrid(features_first=True)).eval()
    x = torch.randn(2, 16, 4, 6)
    with torch.no_grad():
        first = model.blocks[0](x)
        second = model.blocks[1](first)
    expected = {1: similar(first.flatten(2).mT), 2: similar(second.flatten(2).mT)}
    got = diagnosed(model, x)
    del got[0]
    assert got == expected


def test_a_grid_with_as_many_columns_as_features_is_left_out() -> None:
    model, x = Blocks(OnGrid(features_first=True)).eval(), torch.randn(2, 16, 3, 16)
    with pytest.warns(UserWarning, match=rf"blocks\.0\.attention: .* {IN_DOUBT}"):
        reading = only(diagnose(model, x))
    assert reading.features == []
    assert (reading.samples, reading.tokens) == (2, 96)
    assert IN_DOUBT in reading.skipped["blocks.0.attention"]
    assert len(reading.attention) == 1


def test_an_attention_whose_axes_are_turned() -> None:
    model = Blocks(TurnsAround(), TinyBlock(16, 4, causal=False)).eval()
    oblong, square = torch.randn(3, 7, 16), torch.randn(7, 7, 16)
    expected = []
    for x in (oblong, square):
        with torch.no_grad():
            first = model.blocks[0](x)
            expected.append({1: similar(first), 2: similar(model.blocks[1](first))})
    # the second block's attention gives no reason for doubt
    with pytest.warns(UserWarning, match=rf"blocks\.0\.attention: .* {IN_DOUBT}"):
        got = diagnosed(model, square)
    assert got == {2: expected[1][2]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert diagnosed(model, oblong) == {0: similar(oblong), **expected[0]}


def test_as_many_samples_as_a_window_has_tokens() -> None:
    class Windows(TinyBlock):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x.reshape(-1, 4, 16)).reshape(x.shape)

    model = Blocks(Windows(16, 4, causal=False)).eval()
    x = torch.randn(3, 12, 16)
    with torch.no_grad():
        y = model(x)
    assert diagnosed(model, x) == {0: similar(x), 1: similar(y)}
    # the attention has 12 windows of 4 tokens: the block 4 samples of 12, or 12 samples of 4
    x = torch.randn(4, 12, 16)
    with pytest.warns(UserWarning, match=IN_DOUBT):
        assert diagnosed(model, x) == {}


@pytest.mark.parametrize("way", ["in place", "wrapped", "whole"])
def test_compiled_models_and_blocks(way: str) -> None:
    torch.compiler.reset()
    model = Blocks(*(TinyBlock(16, 4, causal=True) for _ in range(2))).eval()
    x = torch.randn(3, 10, 16)
    with torch.no_grad():
        expected = {0: similar(x), 1: similar(model.blocks[0](x)), 2: similar(model(x))}
    gfsa.plug(model)
    options = {"backend": "eager", "fullgraph": True}
    if way == "whole":
        model.compile(**options)
    elif way == "in place":
        for block in model.blocks:
            block.compile(**options)
    else:
        model.blocks = nn.ModuleList(torch.compile(block, **options) for block in model.blocks)
    with torch.no_grad():
        model(x)
    assert diagnosed(model, x) == expected


def test_the_input_alone_is_in_doubt() -> None:
    class Patches(TinyBlock):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x.unfold(2, 4, 4).unfold(3, 4, 4).flatten(4).flatten(1, 3))

    model, x = Blocks(Patches(16, 4, causal=False)).eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        y = model(x)
    with pytest.warns(UserWarning, match=f"^the input of the first block: .*{IN_DOUBT}"):
        reading = only(diagnose(model, x, spectral=False))
    assert {feature.depth: feature.cosine for feature in reading.features} == {1: similar(y)}
    assert list(reading.skipped) == ["the input of the first block"]


@pytest.mark.parametrize("samples", [2, 7])
def test_a_valid_mask_of_another_size_is_refused(samples: int) -> None:
    """Also where the axes of the tokens are in doubt."""
    model, valid = Blocks(TurnsAround()), torch.ones(samples, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"\({samples}, 7\) here .* got \({samples}, 6\)"):
        diagnose(model, torch.randn(samples, 7, 16), valid=valid)


def test_a_model_that_is_sequence_first_inside() -> None:
    import transformers as hf

    config = hf.XLNetConfig(vocab_size=31, d_model=32, n_layer=2, n_head=4, d_inner=32)
    model, ids = hf.XLNetModel(config).eval(), torch.arange(27).reshape(3, 9)
    gfsa.plug(model, unknown="trace")
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    expected = {depth: similar(states[depth]) for depth in (0, 1, 2)}
    assert diagnosed(model, ids, unknown="trace") == expected
    # as many samples as tokens
    with pytest.warns(UserWarning, match=IN_DOUBT):
        assert diagnosed(model, torch.arange(25).reshape(5, 5), unknown="trace") == {}


def test_an_encoder_and_a_decoder_that_are_sequence_first_inside() -> None:
    import transformers as hf

    sizes = {"src_vocab_size": 31, "tgt_vocab_size": 31, **SMALL_PAIR}
    model = hf.FSMTModel(hf.FSMTConfig(langs=["a", "b"], **sizes)).eval()
    ids = torch.arange(27).reshape(3, 9) + 3
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    got = diagnosed(model, ids)
    assert got[1] == similar(out.encoder_hidden_states[1])
    assert got[2] == similar(out.decoder_hidden_states[1])


def test_tokens_of_all_samples_in_one_list() -> None:
    class Flat(TinyBlock):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x.unflatten(0, (3, 5))).flatten(0, 1)

    model, x = Blocks(Flat(16, 4, causal=False)).eval(), torch.randn(15, 16)
    with torch.no_grad():
        y = model(x).unflatten(0, (3, 5))
    assert diagnosed(model, x) == {0: similar(x.unflatten(0, (3, 5))), 1: similar(y)}


def test_samples_of_several_lengths_in_one_list() -> None:
    """As in graph libraries."""
    lengths = [5, 3, 4]
    valid = torch.arange(5) < torch.tensor(lengths)[:, None]

    class Graphs(TinyBlock):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            dense = x.new_zeros(3, 5, 16)
            dense[valid] = x
            return super().forward(dense, valid)[valid]

    model, x = Blocks(Graphs(16, 4, causal=False)).eval(), torch.randn(12, 16)
    with torch.no_grad():
        parts = [measure.cosine_similarity(part) for part in model(x).split(lengths)]
    expected = pytest.approx(torch.stack(parts).mean().item(), abs=1e-5)
    assert diagnosed(model, x)[1] == expected
