"""Filters saved with another version of transformers, which has other names for some layers.

``tests/data/renamed`` has what 5.17 and 5.22 saved; whichever version is installed, both load.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import gfsa
from gfsa.adapters.transformers.refusals import renamings_of
from gfsa.plugs.saving.renames import Renaming
from support.renamed import FOLDER, INPUTS, MODELS, VERSIONS, dinov2, filled, output_of
from support.saved_filters import fill_filters

hf.logging.set_verbosity_error()

OTHER = "another version of the library"


def load(model: Any, folder: Path) -> list[str]:
    """Load filters; returns the warnings about another version."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gfsa.load(model, folder)
    return [str(w.message) for w in caught if OTHER in str(w.message)]


def thetas(model: Any) -> list[torch.Tensor]:
    return [filter.theta.detach() for filter in gfsa.filters_of(model).values()]


def other_folder(name: str, tmp_path: Path) -> Path:
    """A copy of the files whose names the installed version does not have."""
    (found,) = [FOLDER / v / name for v in VERSIONS if load(MODELS[name](), FOLDER / v / name)]
    shutil.copytree(found, tmp_path / name)
    return tmp_path / name


def edit(folder: Path, **changes: Any) -> None:
    """Change a description, and with it the digest that it had."""
    file = folder / "filters.json"
    description = json.loads(file.read_text(encoding="utf-8"))
    del description["sha256"]
    file.write_text(json.dumps({**description, **changes}), encoding="utf-8")


@pytest.mark.parametrize("name", MODELS)
def test_both_versions_load(name: str) -> None:
    expected = MODELS[name]()
    gfsa.plug(expected, K=3)
    fill_filters(expected)
    warned = []
    for version in VERSIONS:
        model = MODELS[name]()
        warned.append(load(model, FOLDER / version / name))
        assert list(gfsa.filters_of(model)) == list(gfsa.filters_of(expected))
        assert all(map(torch.equal, thetas(model), thetas(expected)))
    # one of them has the names of the installed version
    assert sorted(map(len, warned)) == [0, 1]


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_model_computes_what_it_computed_there(name: str, version: str) -> None:
    saved = json.loads((FOLDER / version / "expected.json").read_text(encoding="utf-8"))
    model = filled(MODELS[name]())
    plain = output_of(model, name)
    load(model, FOLDER / version / name)
    found = output_of(model, name)
    assert (found - plain).abs().max() > 1e-2
    torch.testing.assert_close(found, torch.tensor(saved[name]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_folder_of_transformers(version: str) -> None:
    saved = json.loads((FOLDER / version / "expected.json").read_text(encoding="utf-8"))
    model = gfsa.from_pretrained(hf.Dinov2Model, FOLDER / version / "pretrained")
    found = output_of(model, "dinov2")
    torch.testing.assert_close(found, torch.tensor(saved["dinov2"]), rtol=1e-4, atol=1e-5)


def test_into_a_model_around_the_backbone(tmp_path: Path) -> None:
    config = dinov2().config
    model = hf.Dinov2ForImageClassification(config)
    assert load(model, other_folder("dinov2", tmp_path))
    assert len(gfsa.filters_of(model)) == 2


def test_into_a_plugged_model(tmp_path: Path) -> None:
    model = dinov2()
    gfsa.plug(model, K=3)
    before = gfsa.filters_of(model)
    assert load(model, other_folder("dinov2", tmp_path))
    assert gfsa.filters_of(model) == before
    assert all(theta.abs().max() > 0.01 for theta in thetas(model))


def test_is_saved_with_the_names_of_the_installed_version(tmp_path: Path) -> None:
    model = dinov2()
    load(model, other_folder("dinov2", tmp_path))
    gfsa.save(model, tmp_path / "again")
    assert not load(dinov2(), tmp_path / "again")


class TestRefused:
    """Whatever is not certain is refused as a file of another backbone is."""

    def refuse(self, model: Any, folder: Path, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            gfsa.load(model, folder)
        assert not gfsa.filters_of(model)

    def test_other_sizes(self, tmp_path: Path) -> None:
        model = dinov2(hidden_size=12)
        self.refuse(model, other_folder("dinov2", tmp_path), r"does not have|not attention")

    def test_another_depth(self, tmp_path: Path) -> None:
        model = dinov2(num_hidden_layers=3)
        self.refuse(model, other_folder("dinov2", tmp_path), r"3 layers .* with 2 layers")

    def test_another_class(self, tmp_path: Path) -> None:
        model = MODELS["registers"]()
        self.refuse(model, other_folder("dinov2", tmp_path), r"does not have|not attention")

    def test_two_layers_can_be_meant(self, tmp_path: Path) -> None:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "projection_dim": 8}
        config = hf.CLIPConfig(
            text_config={**sizes, **heads, "vocab_size": 13},
            vision_config={**sizes, **heads, "image_size": 8, "patch_size": 4},
        )
        # as if the file were of a model with both towers
        folder = tmp_path / "clip_text"
        shutil.copytree(FOLDER / "5.22.2" / "clip_text", folder)
        edit(folder, model="CLIPModel")
        self.refuse(hf.CLIPModel(config), folder, "does not have")

    def test_a_prefix_of_another_model(self, tmp_path: Path) -> None:
        folder = other_folder("clip_text", tmp_path)
        edit(folder, model="CLIPTextModel")
        self.refuse(MODELS["clip_text"](), folder, "does not have")

    def test_two_filters_for_one_layer(self, tmp_path: Path) -> None:
        folder = other_folder("dinov2", tmp_path)
        entries = {
            name: entry
            for version in VERSIONS
            for name, entry in json.loads(
                (FOLDER / version / "dinov2" / "filters.json").read_text(encoding="utf-8")
            )["filters"].items()
        }
        edit(folder, filters=entries)
        self.refuse(dinov2(), folder, r"does not have|not attention")

    def test_an_adapter_of_peft(self, tmp_path: Path) -> None:
        """peft has no other names: the numbers in its file would stay behind."""
        import peft

        plugged = dinov2()
        gfsa.plug(plugged, K=3)
        targets = [name for name, _ in plugged.named_modules() if name.endswith("fc1")]
        config = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=["gfsa"])
        peft.get_peft_model(plugged, config).save_pretrained(tmp_path)
        layer = next(iter(gfsa.filters_of(plugged))).removeprefix("base_model.model.")
        file = tmp_path / "adapter_model.safetensors"
        tensors = load_file(file)
        inner, outer = ".attention.attention.gfsa.", ".attention.gfsa."
        here, there = (inner, outer) if "attention.attention" in layer else (outer, inner)
        renamed = {name.replace(here, there): value for name, value in tensors.items()}
        assert renamed.keys() != tensors.keys()
        save_file(renamed, file, metadata={"format": "pt"})
        base = dinov2()
        with pytest.raises(ValueError, match=r"does not have|not attention"):
            gfsa.load_peft(base, tmp_path)
        assert not gfsa.filters_of(base)


class Wrapper(torch.nn.Module):
    """As a compiled or a distributed model: one class around any other."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)


class TestPrefixes:
    """A first name more or less is a prefix of transformers' own models alone."""

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_other_models_have_none(self, wrapped: bool, tmp_path: Path) -> None:
        # the names differ by their first part, classes, shapes and depths are the same
        layer = torch.nn.TransformerEncoderLayer(8, 2, 8)
        saved: Any = torch.nn.ModuleDict({"layer": copy.deepcopy(layer)})
        other: Any = torch.nn.ModuleDict({"audio": torch.nn.ModuleDict({"layer": layer})})
        if wrapped:
            saved, other = Wrapper(saved), Wrapper(other)
        gfsa.plug(saved)
        gfsa.save(saved, tmp_path)
        with pytest.raises(ValueError, match="does not have"):
            gfsa.load(other, tmp_path)
        assert not gfsa.filters_of(other)

    def test_a_wrapper_of_another_model(self, tmp_path: Path) -> None:
        """Both are of one class, and so are their layers."""
        folder = other_folder("clip_text", tmp_path)
        edit(folder, model="Wrapper")
        model = Wrapper(MODELS["clip_text"]())
        with pytest.raises(ValueError, match="does not have"):
            gfsa.load(model, folder)
        assert not gfsa.filters_of(model)


@pytest.mark.parametrize(
    ("kind", "older", "newer"),
    [
        (f"{family}{kind}", f"thinker.{older}", f"thinker.model.{newer}")
        for family, text in (
            ("Qwen2_5Omni", "Attention"),
            ("Qwen3OmniMoe", "ThinkerTextAttention"),
        )
        for kind, older, newer in (
            ("AudioAttention", "audio_tower.layers.0.self_attn", "audio_tower.layers.0.self_attn"),
            ("VisionAttention", "visual.blocks.0.attn", "visual.blocks.0.attn"),
            (text, "model.layers.0.self_attn", "language_model.layers.0.self_attn"),
        )
    ],
)
def test_every_part_of_a_whole_omni_model_is_renamed(kind: str, older: str, newer: str) -> None:
    """A file with a layer that is not found is refused as a whole."""
    (known,) = renamings_of(kind)
    assert newer in known.other_names(older)
    assert older in known.reversed().other_names(newer)


class TestRenaming:
    """The table's entries: names and shapes there and back."""

    joined = Renaming(
        kind="Old",
        other_kind="New",
        inside="attention",
        parameters=(("attention.query", "q_proj"), ("output.dense", "o_proj")),
        only_here={"key.bias": "query.bias"},
    )
    here = {  # noqa: RUF012
        "attention.query.weight": (4, 2),
        "attention.query.bias": (4,),
        "output.dense.weight": (2, 4),
    }
    there = {"q_proj.weight": (4, 2), "q_proj.bias": (4,), "o_proj.weight": (2, 4)}  # noqa: RUF012

    def test_names(self) -> None:
        assert list(self.joined.other_names("layer.0.attention.attention")) == ["layer.0.attention"]
        back = self.joined.reversed()
        assert list(back.other_names("layer.0.attention")) == ["layer.0.attention.attention"]
        # this version has no such layer
        assert list(self.joined.other_names("layer.0.attention")) == ["layer.0"]
        assert list(self.joined.other_names("layer.0.self_attn")) == []

    def test_shapes(self) -> None:
        assert self.joined.other_shapes(self.here) == self.there
        layer = {"query.weight": (4, 2), "query.bias": (4,), "key.bias": (4,)}
        assert self.joined.reversed().other_shapes(self.there) == layer
        assert self.joined.reversed().reversed() == self.joined

    def test_parts_are_whole_components(self) -> None:
        moved = Renaming(kind="A", other_kind="A", paths=(("encoder", "model.encoder"),))
        assert list(moved.other_names("encoder.0.attn")) == ["model.encoder.0.attn"]
        assert list(moved.other_names("my_encoder.0.attn")) == []
        both = list(moved.other_names("encoder.encoder.0"))
        assert both == ["model.encoder.encoder.0", "encoder.model.encoder.0"]
