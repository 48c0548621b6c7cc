"""The lens leaves out each layer's own padding, however its mask reaches the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gfsa
from gfsa.lens import diagnose, measure
from gfsa.lens.watch import shown_by_map
from gfsa.operators import DenseOperator
from support.lens import SMALL, SMALL_PAIR, diagnosed, only
from support.tiny import TinyBlock, TinyEncoder, padded_batch

IDS = torch.arange(30).reshape(3, 10) % 17 + 3
MASK = torch.arange(10) < torch.tensor([[10], [6], [8]])


def check(model: nn.Module, inputs: Any, expected: list[float], first: int = 1) -> None:
    """Similarity after each block from ``first`` on."""
    found = [cosine for depth, cosine in diagnosed(model, inputs).items() if depth >= first]
    assert found == pytest.approx(expected, abs=1e-5)


def similar(states: Any, mask: Tensor | None = None) -> list[float]:
    return [measure.cosine_similarity(x, mask).mean().item() for x in states]


def outputs_of(blocks: Any, call: Callable[[], object]) -> list[Tensor]:
    found: list[Tensor] = []
    handles = [
        block.register_forward_hook(
            lambda module, args, output: found.append(
                output if isinstance(output, Tensor) else output[0]
            )
        )
        for block in blocks
    ]
    with torch.no_grad():
        call()
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("plugged", [False, True])
def test_a_decoder_is_not_padded_as_its_source_is(plugged: bool) -> None:
    import transformers as hf

    sizes = {**SMALL_PAIR, "decoder_layers": 2}
    config = hf.BartConfig(vocab_size=31, max_position_embeddings=32, **sizes)
    model = hf.BartForConditionalGeneration(config).eval()
    if plugged:
        gfsa.plug(model, w0=0.2, wK=0.3)
    batch = {"input_ids": IDS, "attention_mask": MASK.long(), "labels": IDS.flip(1)}
    blocks = model.model.decoder.layers
    # the encoder has a layer
    check(model, batch, similar(outputs_of(blocks, lambda: model(**batch))), first=2)


class OfBatches(nn.Module):
    """A model that is called with a whole batch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.net(**batch)


@pytest.mark.parametrize("plugged", [False, True])
@pytest.mark.parametrize("way", ["by name", "by place", "in a batch"])
def test_masks_reach_the_model_in_any_way(way: str, plugged: bool) -> None:
    model = TinyEncoder().eval()
    if plugged:
        gfsa.plug(model, w0=0.2)
    batch = padded_batch([9, 5, 12])
    with torch.no_grad():
        states = model.states(**batch)[1:]
    expected = similar(states, batch["attention_mask"].bool())
    whole = OfBatches(model) if way == "in a batch" else model
    inputs: Any = {
        "by name": batch,
        "by place": tuple(batch.values()),
        "in a batch": (batch,),
    }[way]
    check(whole, inputs, expected)


class Encoder(nn.Module):
    """Causal blocks that are given no mask, or one of pairs under the name of another."""

    def __init__(self, pairs: bool) -> None:
        super().__init__()
        self.pairs = pairs
        self.blocks = nn.ModuleList(NamesItsMask() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.ones(x.shape[1], x.shape[1]).tril() if self.pairs else None
        for block in self.blocks:
            x = block(x, attention_mask=pairs)
        return x


class NamesItsMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = TinyBlock(16, 4, causal=True)

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        out: Tensor = self.block(x)
        return out


class MeanOfEncoder(nn.Module):
    """Padding counts in what is made of an encoder's tokens, not in the encoder."""

    def __init__(self, pairs: bool) -> None:
        super().__init__()
        self.encoder = Encoder(pairs)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.encoder(x)[attention_mask].mean()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("samples", [3, 10])
def test_a_mask_that_an_inner_part_does_not_get(samples: int, pairs: bool) -> None:
    model = MeanOfEncoder(pairs).eval()
    mask = MASK.repeat(4, 1)[:samples]
    # as if the padding were other tokens
    batch = {"x": torch.randn(samples, 10, 16) + 5 * ~mask[..., None], "attention_mask": mask}
    check(model, batch, similar(outputs_of(model.encoder.blocks, lambda: model(**batch)), mask))


def test_a_mask_of_the_batch_that_the_model_does_not_get() -> None:
    model = Encoder(pairs=False).eval()
    x = torch.randn(3, 10, 16) + 5 * ~MASK[..., None]
    expected = similar(outputs_of(model.blocks, lambda: model(x)), MASK)
    batch = {"x": x, "attention_mask": MASK}
    found = diagnosed(model, batch, forward=lambda model, batch: model(batch["x"]))
    assert list(found.values())[1:] == pytest.approx(expected, abs=1e-5)


class MaskedLoss(nn.Module):
    """Attends to padding as well, and leaves it out of the loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(TinyBlock(16, 4, causal=True), TinyBlock(16, 4, causal=True))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.blocks(batch["tokens"])[batch["attention_mask"] > 0].mean()


@pytest.mark.parametrize("kind", ["long", "float", "added"])
def test_a_mask_that_no_attention_sees(kind: str) -> None:
    model = MaskedLoss().eval()
    mask = {"long": MASK.long(), "float": MASK.float(), "added": (~MASK) * -1e4}[kind]
    batch = {"tokens": torch.randn(3, 10, 16), "attention_mask": mask}
    check(model, (batch,), similar(outputs_of(model.blocks, lambda: model(batch)), MASK))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_a_written_map_shows(side: str) -> None:
    """A query that sees nothing has the same weight for all keys, hidden ones among them."""
    import transformers as hf

    config = hf.LlamaConfig(**SMALL, num_key_value_heads=2)
    model = hf.AutoModel.from_config(config, attn_implementation="eager").eval()
    valid = MASK if side == "right" else MASK.flip(1)
    seen = torch.ones(10, 10, dtype=torch.bool).tril() & valid[:, None, None]
    added = torch.zeros(3, 1, 10, 10).masked_fill(~seen, torch.finfo(torch.float32).min)
    batch = {"input_ids": IDS, "attention_mask": added}
    expected = similar(outputs_of(model.layers, lambda: model(**batch)), valid)
    assert only(diagnose(model, batch, spectral=False)).tokens == int(valid.sum())
    gfsa.plug(model)
    check(model, batch, expected)


def shown(matrix: Tensor) -> list[bool]:
    found = shown_by_map(DenseOperator(matrix[None, None]), torch.zeros(1, 1, len(matrix), 2))
    assert found is not None
    return found[0].tolist()


def test_maps_in_which_rows_are_spread_evenly() -> None:
    causal = torch.ones(4, 4).tril().softmax(-1).tril()
    even = torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None]
    for nothing_is_hidden in (torch.full((4, 4), 0.25), causal, even, torch.ones(1, 1)):
        assert shown(nothing_is_hidden) == [True] * len(nothing_is_hidden)
    left = causal.clone()
    left[:2], left[2:, :2] = 0.25, 0
    assert shown(left) == [False, False, True, True]
    right = torch.full((4, 4), 0.25)
    right[:2] = torch.tensor([0.5, 0.5, 0, 0])
    assert shown(right) == [True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
def test_a_mask_of_ones_own_of_any_dtype(dtype: torch.dtype) -> None:
    model, x = TinyEncoder(), torch.randn(3, 10, 16)
    with_bool = only(diagnose(model, x, valid=MASK))
    other = only(diagnose(model, x, valid=MASK.to(dtype)))
    assert other.features == with_bool.features
    assert other.tokens == int(MASK.sum())


def test_what_is_no_mask_is_refused_by_name() -> None:
    model, x = TinyEncoder(), torch.randn(3, 10, 16)
    with pytest.raises(ValueError, match=r"valid must be .* got -10000"):
        diagnose(model, x, valid=(~MASK) * -10000)
    with pytest.raises(TypeError, match=r"valid must be a tensor .* got list"):
        diagnose(model, x, valid=MASK.tolist())


@pytest.mark.parametrize("plugged", [False, True])
def test_encoders_that_pack_their_batches(plugged: bool) -> None:
    """torch's encoders compute padded batches as nested tensors in evaluation mode."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    assert model.use_nested_tensor
    if plugged:
        gfsa.plug(model, w0=0.2)
    batch = {"src": torch.randn(3, 10, 16), "src_key_padding_mask": ~MASK}
    got = list(diagnosed(model, batch).values())[1:]
    assert model.use_nested_tensor
    model.use_nested_tensor = False
    expected = similar(outputs_of(model.layers, lambda: model(**batch)), MASK)
    assert got == pytest.approx(expected, abs=1e-5)
