"""Filters saved with another version of gfsa, or of transformers, which renamed some layers.

``tests/data`` has what gfsa saved at an earlier commit, and with transformers 5.17 and
5.22: whichever version is installed, all of them load.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

import gfsa
from gfsa.plugs.saving import files
from support import saved_filters
from support.saved_filters import (
    DATA,
    FOLDER,
    PLUGGED,
    PRETRAINED,
    encoder,
    fill_filters,
    unpacked,
    waves,
)
from support.tiny import UnknownAttention

hf.logging.set_verbosity_error()

VERSIONS = {name: unpacked(f"transformers-{name}") for name in ("5.17.0", "5.22.2")}

_SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}
_IMAGES = {**_SIZES, "image_size": 8, "patch_size": 4}


def dinov2(**options: Any) -> Any:
    return hf.Dinov2Model(hf.Dinov2Config(**{**_IMAGES, "mlp_ratio": 1, **options}))


def videomae() -> Any:
    config = hf.VideoMAEConfig(**_IMAGES, num_frames=2, use_mean_pooling=False)
    return hf.VideoMAEModel(config)


def clip_text() -> Any:
    sizes = {"vocab_size": 13, "max_position_embeddings": 9, "projection_dim": 8}
    config = hf.CLIPTextConfig(**_SIZES, **sizes, eos_token_id=12)
    return hf.CLIPTextModelWithProjection(config)


def mimi() -> Any:
    sizes = {"num_filters": 2, "codebook_size": 8, "codebook_dim": 4, "num_quantizers": 2}
    more = {"vector_quantization_hidden_dimension": 4, "num_key_value_heads": 2, "head_dim": 4}
    config = hf.MimiConfig(**_SIZES, **sizes, **more, upsampling_ratios=[2], upsample_groups=8)
    return hf.MimiModel(config)


MODELS: dict[str, Callable[[], Any]] = {
    "dinov2": dinov2,
    "videomae": videomae,
    "clip_text": clip_text,
    "mimi": mimi,
}
"""One model for each way in which layers were renamed."""


def _pixels(*shape: int) -> Tensor:
    return waves(shape, phase=0.3).float()


INPUTS: dict[str, dict[str, Tensor]] = {
    "dinov2": {"pixel_values": _pixels(1, 3, 8, 8)},
    "videomae": {"pixel_values": _pixels(1, 2, 3, 8, 8)},
    "clip_text": {"input_ids": torch.tensor([[1, 7, 3, 11, 12]])},
}
"""Inputs of the models whose outputs are compared; Mimi rounds to codes."""


def filled(model: Any) -> Any:
    """The model with weights that depend on their names on the disk, the same in both versions."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        weights = {}
        for name, weight in load_file(file).items():
            offset = 1.0 if weight.dim() == 1 else 0.0
            # VideoMAE's biases alone have other names on the disk
            older = name.replace("q_bias", "query.bias").replace("v_bias", "value.bias")
            numbers = waves(tuple(weight.shape), phase=zlib.crc32(older.encode()) % 1000)
            weights[name] = (offset + 0.4 * numbers).to(weight.dtype)
        save_file(weights, file, metadata={"format": "pt"})
        return type(model).from_pretrained(folder).eval()


@torch.no_grad()
def output_of(model: Any, name: str) -> Tensor:
    """What the model makes of its fixed input."""
    return model.eval()(**INPUTS[name])[0]


def write() -> None:
    """Keep what the installed version of transformers saves of every model, and of one as a whole.

    From the folder ``tests``: ``python -m plugs.test_other_versions``.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, outputs = Path(name), {}
        for name, build in MODELS.items():
            model = filled(build())
            gfsa.plug(model, K=3)
            fill_filters(model)
            gfsa.save(model, folder / name)
            if name in INPUTS:
                outputs[name] = output_of(model, name).tolist()
            if name == "dinov2":
                model.save_pretrained(folder / "pretrained")
        (folder / "expected.json").write_text(json.dumps(outputs), encoding="utf-8")
        shutil.make_archive(str(DATA / f"transformers-{hf.__version__}"), "zip", folder)


OTHER = "another version of the library"


def load(model: Any, folder: Path) -> list[str]:
    """Load filters; returns the warnings about another version."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gfsa.load(model, folder)
    assert not any("other weights" in str(w.message) for w in caught)
    return [str(w.message) for w in caught if OTHER in str(w.message)]


def thetas(model: Any) -> list[torch.Tensor]:
    return [filter.theta.detach() for filter in gfsa.filters_of(model).values()]


def other_folder(name: str, tmp_path: Path) -> Path:
    """A copy of the file whose names the installed version does not have."""
    (found,) = [
        folder / name for folder in VERSIONS.values() if load(filled(MODELS[name]()), folder / name)
    ]
    shutil.copytree(found, tmp_path / name)
    return tmp_path / name


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    description, tensors = files.read(folder)
    change(description)
    files.write(folder, description, tensors)


@pytest.mark.parametrize("name", MODELS)
def test_both_versions_load(name: str) -> None:
    expected = filled(MODELS[name]())
    gfsa.plug(expected, K=3)
    fill_filters(expected)
    warned = []
    for version in VERSIONS:
        model = filled(MODELS[name]())
        warned.append(load(model, VERSIONS[version] / name))
        assert list(gfsa.filters_of(model)) == list(gfsa.filters_of(expected))
        assert all(map(torch.equal, thetas(model), thetas(expected)))
        if name in INPUTS:
            saved = json.loads((VERSIONS[version] / "expected.json").read_text(encoding="utf-8"))
            found = output_of(model, name)
            torch.testing.assert_close(found, torch.tensor(saved[name]), rtol=1e-4, atol=1e-5)
    # one of them has the names of the installed version
    assert sorted(map(len, warned)) == [0, 1]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_folder_of_transformers(version: str) -> None:
    saved = json.loads((VERSIONS[version] / "expected.json").read_text(encoding="utf-8"))
    model = gfsa.from_pretrained(hf.Dinov2Model, VERSIONS[version] / "pretrained")
    found = output_of(model, "dinov2")
    torch.testing.assert_close(found, torch.tensor(saved["dinov2"]), rtol=1e-4, atol=1e-5)


def test_into_a_model_around_the_backbone(tmp_path: Path) -> None:
    backbone = filled(dinov2())
    model = hf.Dinov2ForImageClassification(backbone.config)
    model.dinov2 = backbone
    assert load(model, other_folder("dinov2", tmp_path))
    assert len(gfsa.filters_of(model)) == 2
    # a file of the installed version's names
    gfsa.save(model, tmp_path / "again")
    assert not load(filled(dinov2()), tmp_path / "again")


def test_into_a_plugged_model_of_half_precision(tmp_path: Path) -> None:
    model = filled(dinov2()).bfloat16()
    gfsa.plug(model, K=3)
    before = gfsa.filters_of(model)
    assert load(model, other_folder("dinov2", tmp_path))
    assert gfsa.filters_of(model) == before
    assert all(theta.abs().max() > 0.01 for theta in thetas(model))


def test_a_traced_layer_keeps_its_name_beside_one_with_the_same_number(tmp_path: Path) -> None:
    """The file of a whole model says neither what was traced nor which weights a layer has."""

    def model() -> torch.nn.Module:
        known = torch.nn.TransformerEncoderLayer(8, 2, 8)
        stacks = {"own": UnknownAttention(), "other": known}
        return torch.nn.ModuleDict({n: torch.nn.ModuleList([m]) for n, m in stacks.items()})

    gfsa.plug(saved := model(), unknown="trace", layers="own.0")
    gfsa.save(saved, tmp_path)
    whole = ("backbone", "weights", "traced")
    edit(tmp_path, lambda d: [entry.pop(key) for entry in d["filters"].values() for key in whole])
    assert not load(again := model(), tmp_path)
    assert list(gfsa.filters_of(again)) == ["own.0"]


class TestRefused:
    """Whatever is not certain is refused as a file of another backbone is."""

    def refuse(self, model: Any, folder: Path) -> None:
        with pytest.raises(ValueError, match=r"does not have|not attention|another backbone"):
            gfsa.load(model, folder)
        assert not gfsa.filters_of(model)

    @pytest.mark.parametrize("options", [{}, {"hidden_size": 12}, {"num_hidden_layers": 3}])
    def test_other_weights(self, options: dict[str, int], tmp_path: Path) -> None:
        self.refuse(dinov2(**options), other_folder("dinov2", tmp_path))

    @pytest.mark.parametrize("weights", [None, [], "junk", [0.0] * 16, [None] * 16])
    def test_weights_that_are_none(self, weights: Any, tmp_path: Path) -> None:
        folder = other_folder("dinov2", tmp_path)
        edit(folder, lambda d: [entry.update(weights=weights) for entry in d["filters"].values()])
        self.refuse(filled(dinov2()), folder)

    def test_two_layers_with_the_same_weights(self, tmp_path: Path) -> None:
        layer = torch.nn.TransformerEncoderLayer(8, 2, 8)
        saved = torch.nn.ModuleDict({"layer": copy.deepcopy(layer)})
        gfsa.plug(saved)
        gfsa.save(saved, tmp_path)
        tower = torch.nn.ModuleDict({"layer": copy.deepcopy(layer)})
        self.refuse(torch.nn.ModuleDict({"text": tower, "image": copy.deepcopy(tower)}), tmp_path)
        assert load(torch.nn.ModuleDict({"text": tower}), tmp_path)

    def test_a_part_of_a_whole_model_does_not_take_the_filters_of_another(
        self, tmp_path: Path
    ) -> None:
        config = hf.T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2,
            tie_word_embeddings=False,
        )  # fmt: skip
        model = hf.T5ForConditionalGeneration(config)
        gfsa.plug(model, layers="decoder.*")
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"layer 'decoder\.block\.0.* does not have"):
            gfsa.from_pretrained(hf.T5EncoderModel, tmp_path)

    def test_two_filters_for_one_layer(self, tmp_path: Path) -> None:
        folder = other_folder("dinov2", tmp_path)
        layer = "encoder.layer.0.more"
        edit(folder, lambda d: d["filters"].update({layer: next(iter(d["filters"].values()))}))
        self.refuse(filled(dinov2()), folder)

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


# what gfsa saved at commit d3ade9e
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


def check_output(model: torch.nn.Module, name: str) -> None:
    torch.testing.assert_close(
        saved_filters.output_of(model), torch.tensor(EXPECTED[name]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", PLUGGED)
def test_a_filter_folder_loads_and_is_written_again_as_it_was(name: str, tmp_path: Path) -> None:
    model = encoder()
    plain = saved_filters.output_of(model)
    gfsa.load(model, FOLDER / name)
    assert (saved_filters.output_of(model) - plain).abs().max() > 1e-2
    check_output(model, name)
    gfsa.save(model, tmp_path)
    (written, tensors), (before, tensors_before) = map(files.read, (tmp_path, FOLDER / name))
    for entry in written["filters"].values():
        # older versions did not say it
        assert entry.pop("traced") is False
        assert entry.pop("weights")
    # kinds, arguments, and where dropout acts
    assert written == {**before, "gfsa": gfsa.__version__}
    assert tensors.keys() == tensors_before.keys()
    assert all(torch.equal(tensors[key], value) for key, value in tensors_before.items())


@pytest.mark.parametrize("name", PRETRAINED)
def test_an_earlier_folder_of_transformers(name: str) -> None:
    model = gfsa.from_pretrained(type(PRETRAINED[name]()), FOLDER / name)
    assert len(gfsa.filters_of(model)) == 2
    check_output(model, name)


def test_a_whole_state_dict() -> None:
    model = encoder()
    gfsa.plug(model, K=4, layers=[2], learn=("wK",))
    plain = saved_filters.output_of(model)
    saved = torch.load(FOLDER / "state_dict.pt", weights_only=True)
    assert list(saved) == list(model.state_dict())
    model.load_state_dict(saved)
    assert (saved_filters.output_of(model) - plain).abs().max() > 1e-2
    check_output(model, "state_dict")


if __name__ == "__main__":
    write()
