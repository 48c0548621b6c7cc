"""accelerate's offloading: filters have values where their layer computes, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn

import gfsa
from support.tiny import TinyEncoder
from support.zoo import ZOO

BATCH = ZOO["bert"].batch()
OFFLOADS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "cpu": lambda model, folder: accelerate.cpu_offload(model),
    "disk": lambda model, folder: accelerate.disk_offload(
        model, str(folder / "offload"), execution_device="cpu"
    ),
    "dispatch": lambda model, folder: accelerate.dispatch_model(
        model, {"": "cpu"}, main_device="cpu", force_hooks=True
    ),
}


def bert() -> nn.Module:
    return ZOO["bert"].model("sdpa")


@torch.no_grad()
def output(model: nn.Module) -> Tensor:
    return model(**BATCH)[0]


def plug(model: nn.Module) -> None:
    gfsa.plug(model, w0=0.2, wK=0.1)


@pytest.mark.parametrize("where", OFFLOADS)
@pytest.mark.parametrize("first", ["offload", "plug"])
def test_offloaded_models_compute_the_same(first: str, where: str, tmp_path: Path) -> None:
    model = bert()
    reference = copy.deepcopy(model)
    plug(reference)
    expected = output(reference)
    assert not torch.equal(expected, output(bert()))
    if first == "plug":
        plug(model)
    OFFLOADS[where](model, tmp_path)
    if first == "offload":
        plug(model)
        assert not any(filter.theta.is_meta for filter in gfsa.filters_of(model).values())
    assert torch.equal(output(model), expected)


def test_filters_of_a_model_that_was_offloaded_before_are_saved_and_loaded(tmp_path: Path) -> None:
    model = bert()
    accelerate.cpu_offload(model)
    plug(model)
    gfsa.save(model, tmp_path / "filters")
    expected = output(model)
    gfsa.unplug(model)
    gfsa.load(model, tmp_path / "filters")
    assert torch.equal(output(model), expected)


def test_filters_without_values_are_neither_saved_nor_loaded_into(tmp_path: Path) -> None:
    model = bert()
    plug(model)
    gfsa.save(model, tmp_path)
    before = (tmp_path / "filters.safetensors").read_bytes()
    expected = output(model)
    accelerate.cpu_offload(model)
    with pytest.raises(ValueError, match="is on the meta device and has no values to save"):
        gfsa.save(model, tmp_path)
    assert (tmp_path / "filters.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match="is on the meta device, where the numbers"):
        gfsa.load(model, tmp_path)
    assert torch.equal(output(model), expected)


def test_a_model_without_weights_is_not_loaded_into(tmp_path: Path) -> None:
    model = TinyEncoder()
    gfsa.plug(model)
    gfsa.save(model, tmp_path)
    with torch.device("meta"):
        empty = TinyEncoder()
    with pytest.raises(ValueError, match="is on the meta device, where the numbers"):
        gfsa.load(empty, tmp_path)
    assert not gfsa.filters_of(empty)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def test_a_forward_that_a_class_cannot_replace_is_refused() -> None:
    """accelerate sets the forward of an instance; the layer would compute plain attention."""
    model = encoder()
    accelerate.cpu_offload(model)
    with pytest.raises(ValueError, match=r"has a forward of its own.*plug first, then offload"):
        gfsa.plug(model)
    assert not gfsa.filters_of(model)


def test_a_block_that_is_offloaded_as_a_whole_is_refused() -> None:
    model = bert()
    accelerate.cpu_offload(model, preload_module_classes=["BertLayer"])
    with pytest.raises(ValueError, match=r"offloads the block around .*layer\.0.*as a whole"):
        gfsa.plug(model)
    assert not gfsa.filters_of(model)
    output(model)


def test_a_filter_that_a_wrapper_still_calls_is_not_removed() -> None:
    model = TinyEncoder().eval()
    x = torch.randn(2, 5, 16)
    plain = model(x)
    gfsa.plug(model, w0=0.3)
    filtered = model(x)
    accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    attention = model.blocks[0].attention
    accelerate.hooks.add_hook_to_module(attention, accelerate.hooks.ModelHook())
    for remove in (gfsa.unplug, lambda model: gfsa.prune(model, tolerance=9.0)):
        with pytest.raises(ValueError, match=r"forward of blocks\.0\.attention was wrapped"):
            remove(model)
        assert torch.equal(model(x), filtered)
    remove_hook_from_module(model, recurse=True)
    gfsa.unplug(model)
    assert torch.equal(model(x), plain)
