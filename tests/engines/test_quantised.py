"""Weights of few bits beside filters, which stay in their own precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import gfsa
from engines.shared import tiny_llama
from support.plugging import randomise


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny_llama(wide=True, num_hidden_layers=3, initializer_range=0.1).eval()


@pytest.fixture(scope="module")
def filters(plain: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with filters that are far from plain attention, different in every head."""
    model = copy.deepcopy(plain)
    gfsa.plug(model, K=3)
    folder = tmp_path_factory.mktemp("filters")
    gfsa.save(randomise(model), folder)
    return folder


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 64, (4, 48), generator=torch.Generator().manual_seed(2))


def by_torchao(model: Any) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = copy.deepcopy(model)
    quantize_(model, Int8WeightOnlyConfig())
    return model


def by_bitsandbytes(model: Any, folder: Path, **how: Any) -> Any:
    model.save_pretrained(folder)
    config = transformers.BitsAndBytesConfig(**how)
    found = transformers.LlamaForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    return found.eval()


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "torchao, int8 weights": lambda model, folder: by_torchao(model),
    "bitsandbytes, int8": lambda model, folder: by_bitsandbytes(model, folder, load_in_8bit=True),
    "bitsandbytes, nf4": lambda model, folder: by_bitsandbytes(
        model, folder, load_in_4bit=True, bnb_4bit_quant_type="nf4"
    ),
}


def distance(model: Any, other: Any, tokens: Tensor) -> float:
    """How far two models' logits are apart, relative to the second's."""
    with torch.no_grad():
        y, expected = model(tokens).logits, other(tokens).logits
    return float((y - expected).norm() / expected.norm())


@pytest.mark.parametrize("way", WAYS)
def test_filters_beside_quantised_weights(
    way: str, plain: Any, filters: Path, tokens: Tensor, tmp_path: Path
) -> None:
    """Quantised weights change a filtered model about as much as a plain one."""
    filtered = copy.deepcopy(plain)
    gfsa.load(filtered, filters)
    quantised = WAYS[way](plain, tmp_path)
    moved_plain = distance(quantised, plain, tokens)
    gfsa.load(quantised, filters)
    assert len(gfsa.filters_of(quantised)) == len(gfsa.filters_of(filtered)) > 0
    for found in gfsa.filters_of(quantised).values():
        assert found.theta.dtype == torch.float32
    moved = distance(quantised, filtered, tokens)
    assert moved < 2 * moved_plain
    # the filters act
    assert distance(filtered, plain, tokens) > 2 * moved


def test_filters_of_quantised_weights_fit_the_others(
    plain: Any, filters: Path, tmp_path: Path
) -> None:
    """Trained on four bits, merged and served in full precision."""
    quantised = WAYS["bitsandbytes, nf4"](plain, tmp_path / "model")
    gfsa.load(quantised, filters)
    gfsa.save(quantised, tmp_path / "filters")
    whole = copy.deepcopy(plain)
    gfsa.load(whole, tmp_path / "filters")
    for name, found in gfsa.filters_of(whole).items():
        assert torch.equal(found.theta, gfsa.filters_of(quantised)[name].theta)


def test_quantised_before_or_after(plain: Any, filters: Path, tokens: Tensor) -> None:
    after = by_torchao(plain)
    gfsa.load(after, filters)
    before = copy.deepcopy(plain)
    gfsa.load(before, filters)
    before = by_torchao(before)
    with torch.no_grad():
        assert torch.equal(before(tokens).logits, after(tokens).logits)


def test_cached_decoding_is_that_of_the_whole_sequence(
    plain: Any, filters: Path, tokens: Tensor
) -> None:
    model = by_torchao(plain)
    gfsa.load(model, filters)
    found = model.generate(tokens[:1, :8], max_new_tokens=40, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        again = model(found).logits.argmax(-1)[:, 7:-1]
    assert torch.equal(found[:, 8:], again[:, : found.shape[1] - 8])


def test_what_it_costs(
    plain: Any, filters: Path, tokens: Tensor, costs: Any, record_testsuite_property: Any
) -> None:
    unfiltered = by_torchao(plain)
    filtered = copy.deepcopy(unfiltered)
    gfsa.load(filtered, filters)

    def generate(model: Any) -> Any:
        return model.generate(
            tokens,
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
        )

    sizes = [size_of_cache(generate(model).past_key_values) for model in (filtered, unfiltered)]
    # keys and values have 2 heads each, A·v has 4
    assert sizes[0] / sizes[1] == 2
    record_testsuite_property(
        "memory", f"{sizes[0] / sizes[1]:.2g}× a token (half as many key heads)"
    )
    of = "`generate` (int8 weights, 3 layers of 128 features, 4 × 64 tokens)"
    costs(generate, filtered, unfiltered, of, rounds=7)


def size_of_cache(cache: Any) -> int:
    """Bytes of keys, values and stored powers."""
    size = 0
    for layer in cache.layers:
        stored = [one for kept in getattr(layer, "gfsa_powers", {}).values() for one in kept]
        for tensor in (layer.keys, layer.values, *(power.keys for power in stored)):
            size += tensor.numel() * tensor.element_size()
    return size
