"""diagnose: features against the states of models of our own and of other libraries."""

from __future__ import annotations

import copy
import math
import sys
from collections import UserDict
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gfsa
from gfsa.lens import diagnose, measure
from support.encoder import EfficientAttention, Encoder
from support.lens import SMALL, only
from support.tiny import TinyEncoder, padded_batch


def expected_cosines(states: list[Tensor], mask: Tensor | None) -> list[float]:
    valid = None if mask is None else mask.bool()
    return [measure.cosine_similarity(x, valid).mean().item() for x in states]


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return padded_batch([9, 5, 12, 7])


@pytest.mark.parametrize("plugged", [False, True, "some"])
def test_features_are_what_leaves_each_block(plugged: bool | str, batch: dict[str, Tensor]) -> None:
    model = TinyEncoder(depth=4).eval()
    if plugged:
        gfsa.plug(model, w0=0.3, wK=-0.2, layers=[2, 4] if plugged == "some" else "all")
    with torch.no_grad():
        states = model.states(**batch)
    reading = only(diagnose(model, batch))
    expected = expected_cosines(states, batch["attention_mask"])
    assert [feature.cosine for feature in reading.features] == pytest.approx(expected)
    assert [feature.depth for feature in reading.features] == [0, 1, 2, 3, 4]
    assert (reading.samples, reading.tokens) == (4, 33)
    filtered = [layer.depth for layer in reading.attention if layer.filter is not None]
    assert filtered == {False: [], True: [1, 2, 3, 4], "some": [2, 4]}[plugged]


def test_a_block_that_runs_at_every_depth_has_a_reading_for_each(batch: dict[str, Tensor]) -> None:
    model = TinyEncoder(depth=3, shared=True).eval()
    with torch.no_grad():
        states = model.states(**batch)
    reading = only(diagnose(model, batch))
    expected = expected_cosines(states, batch["attention_mask"])
    assert [feature.cosine for feature in reading.features] == pytest.approx(expected)
    assert [layer.name for layer in reading.attention] == [
        f"blocks.0.attention (run {turn})" for turn in (1, 2, 3)
    ]


def test_parts_that_are_called_apart_are_measured_in_the_order_in_which_they_run() -> None:
    model = nn.ModuleDict({"first": TinyEncoder(), "second": TinyEncoder()})
    batch, parts = padded_batch([6, 4]), ("second", "first", "first")
    reading = only(diagnose(model, batch, forward=lambda m, b: [m[part](**b) for part in parts]))
    with torch.no_grad():
        states = [model[part].states(**batch) for part in parts]
    expected = expected_cosines(
        [states[0][0], *(state for part in states for state in part[1:])], batch["attention_mask"]
    )
    assert [feature.cosine for feature in reading.features] == pytest.approx(expected)


def test_padding_takes_no_part(batch: dict[str, Tensor]) -> None:
    model = TinyEncoder()
    gfsa.plug(model, w0=0.3, wK=-0.2)
    together = only(diagnose(model, batch))
    alone = []
    for tokens, mask in zip(batch["tokens"], batch["attention_mask"], strict=True):
        alone.append(only(diagnose(model, tokens[mask.bool()][None])))
    for depth, feature in enumerate(together.features):
        for name in ("cosine", "effective_rank", "residual", "norm"):
            parts = [getattr(reading.features[depth], name) for reading in alone]
            assert getattr(feature, name) == pytest.approx(sum(parts) / len(parts), rel=1e-4), name
    for depth, layer in enumerate(together.attention):
        for name in ("entropy", "entropy_share", "energy_before", "energy_after"):
            parts = torch.tensor([getattr(reading.attention[depth], name) for reading in alone])
            torch.testing.assert_close(
                torch.tensor(getattr(layer, name)), parts.mean(0), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("width", [16, 17])
@pytest.mark.parametrize("plugged", [False, True, "some"])
def test_the_model_is_left_as_it_was(
    plugged: bool | str, width: int, batch: dict[str, Tensor]
) -> None:
    model = TinyEncoder()
    if plugged:
        gfsa.plug(model, w0=0.3, layers=[2] if plugged == "some" else "all")
    model.train()
    model.blocks[1].eval()
    before = copy.deepcopy(model)
    generator = torch.get_rng_state()
    # tokens of another width are an error
    with nullcontext() if width == 16 else pytest.raises(RuntimeError):
        diagnose(model, torch.zeros(2, 8, width))
    assert torch.equal(torch.get_rng_state(), generator)
    for (name, now), (_, was) in zip(model.named_modules(), before.named_modules(), strict=True):
        assert type(now) is type(was), name
        assert now.training == was.training, name
        assert set(now.__dict__) - {"_gfsa_watch"} == set(was.__dict__) - {"_gfsa_watch"}, name
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            kept = len(getattr(now, hooks))
            assert kept <= len(getattr(was, hooks)), name
    for (name, now), (_, was) in zip(
        model.state_dict().items(), before.state_dict().items(), strict=True
    ):
        assert torch.equal(now, was), name
    torch.testing.assert_close(model(**batch), before(**batch), rtol=0, atol=0)


def test_batches_are_averaged_sample_by_sample() -> None:
    model = TinyEncoder()
    tokens = torch.randn(6, 8, 16)
    whole = only(diagnose(model, tokens, spectral_samples=6))
    parts = only(diagnose(model, [tokens[:4], tokens[4:]], spectral_samples=6))
    assert parts.samples == 6
    for a, b in zip(whole.features, parts.features, strict=True):
        assert a.cosine == pytest.approx(b.cosine)
        assert a.singular_values == pytest.approx(b.singular_values)
    for one, other in zip(whole.attention, parts.attention, strict=True):
        assert one.entropy == pytest.approx(other.entropy)
        for row, same in zip(
            one.spectrum.filter_response, other.spectrum.filter_response, strict=True
        ):
            assert row == pytest.approx(same)


def test_loaders_of_labelled_data_and_generators() -> None:
    model = TinyEncoder()
    data = torch.utils.data.TensorDataset(torch.randn(6, 8, 16), torch.arange(6))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    report = diagnose({"a": model, "b": model}, loader, progress=True)
    assert [reading.samples for reading in report.models.values()] == [6, 6]
    generator = (torch.randn(2, 8, 16) for _ in range(3))
    report = diagnose({"a": model, "b": model}, generator, max_batches=2)
    assert [reading.samples for reading in report.models.values()] == [4, 4]


def test_batches_that_the_measured_model_makes_are_not_measured() -> None:
    model, x = TinyEncoder(), torch.randn(2, 8, 16)
    with torch.no_grad():
        made = [model.blocks[0](x) for _ in range(2)]
        report = diagnose(model, (model.blocks[0](x) for _ in range(2)))
    assert only(report).features == only(diagnose(model, iter(made))).features


@pytest.mark.parametrize("kind", [UserDict, type("Output", (dict,), {})])
def test_features_are_found_in_containers_of_other_classes(kind: Any) -> None:
    class Wrapped(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
            return kind(hidden=self.block(x, mask))

    class Opening(nn.Module):
        def __init__(self, blocks: nn.ModuleList) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(map(Wrapped, blocks))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)["hidden"]
            return x

    model, x = TinyEncoder(depth=2).eval(), torch.randn(3, 8, 16)
    found = only(diagnose(Opening(model.blocks), x))
    with torch.no_grad():
        states = [x, model.blocks[0](x), model.blocks[1](model.blocks[0](x))]
    expected = expected_cosines(states, None)
    assert [feature.cosine for feature in found.features] == pytest.approx(expected)


def test_selected_layers_only() -> None:
    model = TinyEncoder(depth=4)
    reading = only(diagnose(model, torch.randn(2, 8, 16), layers=[2, 3]))
    assert [layer.depth for layer in reading.attention] == [2, 3]
    assert [feature.depth for feature in reading.features] == [2, 3]
    with pytest.raises(ValueError, match="no layer 9"):
        diagnose(model, torch.randn(2, 8, 16), layers=[9])


def test_long_maps_are_not_built_nor_features_that_are_not_asked_for() -> None:
    # for attention and spectra see test_json_has_no_nan
    model, x = TinyEncoder(), torch.randn(1, 20, 16)
    reading = only(diagnose(model, x, most_tokens=16, features=False))
    assert reading.features == []
    found = reading.attention[0].spectrum
    assert found.map_values == []
    assert all(math.isnan(entropy) for entropy in reading.attention[0].entropy)
    assert "more than 16 tokens" in reading.skipped[reading.attention[0].name]
    assert len(found.map_response[0]) == 11


def test_filters_show_in_the_readings(batch: dict[str, Tensor]) -> None:
    """Coefficients, response and energy of a plugged layer against the dense map of that layer."""
    model = TinyEncoder(depth=1, heads=2).double()
    gfsa.plug(model, filter=gfsa.Laplacian)
    tokens = torch.randn(1, 10, 16, dtype=torch.float64)
    layer = only(diagnose(model, tokens)).attention[0]
    assert layer.coefficients == [[1, -1], [1, -1]]
    assert layer.verdict == ["high-pass", "high-pass"]
    for on_map, on_filter in zip(
        layer.spectrum.map_response, layer.spectrum.filter_response, strict=True
    ):
        assert on_map[0] == pytest.approx(1)
        # I − A takes the constant away
        assert on_filter[0] == pytest.approx(0, abs=1e-7)


def test_what_makes_no_sense_is_refused() -> None:
    model = TinyEncoder()
    with pytest.raises(TypeError, match=r"expected an nn\.Module"):
        diagnose({"a": "bert"}, torch.randn(1, 8, 16))
    with pytest.raises(ValueError, match="got an empty mapping"):
        diagnose({}, torch.randn(1, 8, 16))
    with pytest.raises(ValueError, match="expected at least one batch"):
        diagnose(model, [])
    with pytest.raises(ValueError, match="no self-attention"):
        diagnose(nn.Linear(2, 2), torch.randn(1, 2))


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (None, "that enter the first block"),
        ("blocks.1.norm1.weight", r"that leave the attention of blocks\.1\.attention"),
        ("blocks.1.norm2.weight", r"that leave the block of blocks\.1\.attention"),
    ],
)
def test_tokens_that_are_not_finite_are_refused(weight: str | None, said: str) -> None:
    model, x = TinyEncoder().eval(), torch.randn(1, 8, 16)
    if weight is None:
        x[0, 3, 5] = torch.inf
    else:
        with torch.no_grad():
            model.get_parameter(weight).fill_(torch.nan)
    with pytest.raises(ValueError, match=said):
        diagnose(model, x)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before 3.11")
def test_an_error_says_how_the_parts_of_a_batch_were_passed() -> None:
    targets = torch.randn(2, 8, 16)
    with pytest.raises(TypeError, match="positional arguments") as error:
        diagnose(TinyEncoder(), [(torch.randn(2, 8, 16), targets, targets)])
    assert "the 3 parts of a batch" in error.value.__notes__[0]


def test_a_pair_is_labelled_data_in_a_loader_and_two_arguments_alone() -> None:
    class Pairs(TinyEncoder):
        def forward(self, tokens: Tensor, second: Tensor | None = None) -> Tensor:
            given.append(second)
            return super().forward(tokens)

    given: list[Tensor | None] = []
    pair = (torch.randn(3, 8, 16), torch.arange(3))
    diagnose(Pairs(), pair)
    diagnose(Pairs(), [pair])
    assert given == [pair[1], None]


IDS = torch.arange(30).reshape(3, 10) % 17
MASK = torch.arange(10) < torch.tensor([[10], [6], [8]])


def transformers_model(kind: str, implementation: str = "sdpa") -> Any:
    import transformers as hf

    config = {
        "bert": lambda: hf.BertConfig(**SMALL),
        "albert": lambda: hf.AlbertConfig(**SMALL, embedding_size=16),
        "llama": lambda: hf.LlamaConfig(**SMALL, num_key_value_heads=2),
        "gpt2": lambda: hf.GPT2Config(
            vocab_size=31, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        ),
    }[kind]()
    config.initializer_range = 0.5
    return hf.AutoModel.from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["bert", "albert", "llama", "gpt2"])
@pytest.mark.parametrize("plugged", [False, True])
def test_transformers(kind: str, implementation: str, plugged: bool) -> None:
    model = transformers_model(kind, implementation)
    batch = {"input_ids": IDS, "attention_mask": MASK.flip(1) if kind == "llama" else MASK}
    batch["attention_mask"] = batch["attention_mask"].long()
    if plugged:
        gfsa.plug(model, w0=0.2, wK=0.3)
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    reading = only(diagnose(model, batch))
    expected = expected_cosines(list(states), batch["attention_mask"].bool())
    got = [feature.cosine for feature in reading.features]
    assert len(got) == 3
    # decoders report their last features after the final norm
    last = 2 if kind in ("llama", "gpt2") else 3
    assert got[:last] == pytest.approx(expected[:last], abs=1e-5)
    assert reading.tokens == int(MASK.sum())
    assert bool(gfsa.filters_of(model)) == plugged


def test_linear_attention() -> None:
    model = Encoder(17, EfficientAttention, dim=16, num_heads=4)
    reading = only(diagnose(model, (IDS, ~MASK)))
    # a class token for each of three samples
    assert (reading.samples, reading.tokens) == (3, int(MASK.sum()) + 3)
    alone = [only(diagnose(model, ids[mask][None])) for ids, mask in zip(IDS, MASK, strict=True)]
    parts = torch.tensor([reading_alone.attention[-1].entropy for reading_alone in alone]).mean(0)
    torch.testing.assert_close(torch.tensor(reading.attention[-1].entropy), parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    model = transformers_model("bert")
    batch = {"input_ids": IDS, "attention_mask": MASK.long()}
    single = only(diagnose(model, batch))
    other = only(diagnose(model.to(dtype), batch))
    for one, two in zip(single.features, other.features, strict=True):
        assert one.cosine == pytest.approx(two.cosine, abs=0.02)
        assert one.effective_rank == pytest.approx(two.effective_rank, rel=0.02)
    for layer, same in zip(single.attention, other.attention, strict=True):
        assert layer.entropy_share == pytest.approx(same.entropy_share, abs=0.05)
        for row, again in zip(layer.spectrum.map_response, same.spectrum.map_response, strict=True):
            assert row == pytest.approx(again, abs=0.05)


def test_attention_whose_forward_is_called_by_itself() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.MultiheadAttention(16, 4, batch_first=True)
            self.b = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.a(x, x, x, need_weights=False)[0]
            return x + self.b.forward(x, x, x, need_weights=False)[0]

    with pytest.warns(UserWarning, match="b: tokens were not measured"):
        reading = only(diagnose(Pair().eval(), torch.randn(2, 5, 16)))
    assert [(layer.name, layer.depth) for layer in reading.attention] == [("a", 1), ("b", 2)]
    assert list(reading.skipped) == ["b"]
