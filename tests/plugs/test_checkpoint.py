"""Saving and loading filters: validation, and a model unchanged by a failed load."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load, save
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

import gfsa
from gfsa.plugs.saving import files
from support.zoo import ZOO

transformers.logging.set_verbosity_error()

FILTERS: dict[str, Callable[[int], gfsa.GraphFilter]] = {
    "gfsa": lambda heads: gfsa.GFSA(heads, K=5, learn=("w0", "wK"), w1=0.9, lr_multiplier=3.0),
    "exact": lambda heads: gfsa.GFSA(heads, K=3, power="exact"),
    "degree 1": lambda heads: gfsa.GFSA(heads, K=None),
    "polynomial": lambda heads: gfsa.Polynomial(heads, degree=3),
    "twicing": gfsa.Twicing,
    "pagerank": lambda heads: gfsa.PageRank(heads, alpha=0.3, hops=2),
}


def model_of(name: str = "bert") -> Any:
    return ZOO[name].model("sdpa")


def randomised(model: Any) -> Any:
    with torch.no_grad():
        for filter in gfsa.filters_of(model).values():
            if filter.theta is not None:
                filter.theta.normal_(std=0.3)
    return model


def output(model: Any, name: str = "bert") -> torch.Tensor:
    return model(**ZOO[name].batch())[0]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = model_of()
    gfsa.plug(model, K=3)
    gfsa.save(randomised(model), tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", FILTERS)
def test_round_trip(kind: str, tmp_path: Path) -> None:
    model = model_of()
    gfsa.plug(model, filter=FILTERS[kind], layers="even", dropout_after="filter")
    expected = output(randomised(model))
    gfsa.save(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["filters.safetensors"]
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 10_000

    fresh = model_of()
    gfsa.load(fresh, tmp_path)
    assert torch.equal(output(fresh), expected)
    assert repr(gfsa.filters_of(fresh)) == repr(gfsa.filters_of(model))
    assert all(f.dropout_after == "filter" for f in gfsa.filters_of(fresh).values())
    # into a model that is plugged alike, where dropout acts elsewhere so far
    gfsa.unplug(fresh)
    gfsa.plug(fresh, filter=FILTERS[kind], layers="even")
    gfsa.load(fresh, tmp_path)
    assert torch.equal(output(fresh), expected)
    assert all(f.dropout_after == "filter" for f in gfsa.filters_of(fresh).values())


def test_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no filters to save; gfsa\.plug\(model\) first"):
        gfsa.save(model_of(), tmp_path)


@pytest.mark.parametrize("below", [".", "filters"])
def test_what_cannot_be_a_folder_is_named(below: str, tmp_path: Path) -> None:
    model = torch.nn.TransformerEncoderLayer(8, 2, 8)
    gfsa.plug(model)
    (tmp_path / "taken").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("taken", "link"):
        with pytest.raises(OSError, match=rf"a part of .*{name}.* is a file or a broken link"):
            gfsa.save(model, tmp_path / name / below)


def damage(
    description: Callable[[dict[str, Any]], object] = lambda description: None,
    tensors: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None,
) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = files.read(folder)
        description(content[0])
        tensors(content[1])
        files.write(folder, *content)

    return change


def change_first(**changes: Any) -> Callable[[Path], None]:
    return damage(lambda description: description["filters"][FIRST].update(changes))


def rename_first(name: str) -> Callable[[Path], None]:
    return damage(lambda d: d["filters"].update({name: d["filters"].pop(FIRST)}))


def arguments(**changes: Any) -> Callable[[Path], None]:
    return damage(lambda description: description["filters"][FIRST]["arguments"].update(changes))


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda p: (p / files.FILE).write_bytes(change((p / files.FILE).read_bytes()))


FIRST = "encoder.layer.0.attention.self"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            damage(tensors=lambda t: t.pop(f"{FIRST}.theta")),
            "theta should be floating point of shape .*, got nothing",
        ),
        (damage(tensors=lambda t: t.update(x=torch.zeros(1))), "describes: x; save"),
        (rewrite(lambda content: content[:-20]), "filters.safetensors is damaged"),
        (rewrite(lambda content: save(load(content))), "does not describe its filters"),
        (lambda p: (p / files.FILE).unlink(), "filters.safetensors does not exist"),
        (damage(lambda d: d.update(format=9)), "format 9, .* reads format 1"),
        (damage(lambda d: d.update(filters={})), "describes no filters"),
        (rename_first("nowhere"), "layer 'nowhere', which BertForMaskedLM does not have"),
        (
            rename_first("encoder"),
            "'encoder', which .* does not have; its attention",
        ),
        (
            change_first(kind="os.system"),
            "cannot be built: filter must be .*'os.system'",
        ),
        (arguments(K=1), "cannot be built: K must be"),
        (arguments(speed=9), "cannot be built: .*speed"),
        (arguments(num_heads=8), "for 8 heads, .* has 4"),
        (change_first(backbone={"class": "X"}, weights=[1.0]), "belongs to another backbone"),
    ],
)
def test_damaged_folders_change_nothing(
    change: Callable[[Path], None], message: str, saved: Path
) -> None:
    change(saved)
    model = model_of()
    keys, expected = list(model.state_dict()), output(model)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        gfsa.load(model, saved)
    assert not gfsa.filters_of(model)
    assert list(model.state_dict()) == keys
    assert torch.equal(output(model), expected)


def test_a_deeper_model_is_another_backbone(tmp_path: Path) -> None:
    def encoder(depth: int) -> torch.nn.Module:
        layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        return torch.nn.TransformerEncoder(layer, depth).eval()

    model = encoder(2)
    gfsa.plug(model, layers=[1])
    gfsa.save(model, tmp_path)
    deeper = encoder(3)
    with pytest.raises(
        ValueError,
        match=r"another backbone: TransformerEncoder has {'layers\.\*\.self_attn': 3} layers, the "
        r"filters were saved from a TransformerEncoder with {'layers\.\*\.self_attn': 2}",
    ):
        gfsa.load(deeper, tmp_path)
    assert not gfsa.filters_of(deeper)
    # of versions that did not say
    damage(lambda description: description.pop("layers"))(tmp_path)
    gfsa.load(deeper, tmp_path)
    assert list(gfsa.filters_of(deeper)) == ["layers.0.self_attn"]


def test_a_model_plugged_otherwise_is_left_alone(saved: Path) -> None:
    model = model_of()
    gfsa.plug(model, filter=gfsa.Twicing)
    with pytest.raises(ValueError, match=r"plugged with a Twicing .* has a GFSA"):
        gfsa.load(model, saved)
    gfsa.unplug(model)
    gfsa.plug(model, K=4)
    with pytest.raises(ValueError, match=r"'K': 4.* has .*'K': 3"):
        gfsa.load(model, saved)
    gfsa.unplug(model)
    gfsa.plug(model, K=3, layers=[1])
    with pytest.raises(ValueError, match=r"plugged in layers .*layer.0.*, but .*layer.1"):
        gfsa.load(model, saved)


@pytest.mark.parametrize("name", ZOO)
def test_whole_models(name: str, tmp_path: Path) -> None:
    case = ZOO[name]
    model = case.model(case.implementations[0]).float()
    batch = {k: x.float() if x.is_floating_point() else x for k, x in case.batch().items()}
    gfsa.plug(model, K=5, layers="odd", dropout_after="filter")
    expected = randomised(model)(**batch)[0]
    # the description travels with the filters; the model's config is left alone
    assert "gfsa" not in model.config.to_dict()
    model.save_pretrained(tmp_path)
    loaded = gfsa.from_pretrained(
        type(model), tmp_path, attn_implementation=case.implementations[0]
    ).eval()
    if name == "gpt_oss":
        # as in the model; it is no part of a config
        loaded.set_experts_implementation("eager")
    assert torch.equal(loaded(**batch)[0], expected)
    filters = gfsa.filters_of(loaded)
    assert list(filters) == list(gfsa.filters_of(model))
    assert all(f.K == 5 and f.dropout_after == "filter" for f in filters.values())


@pytest.mark.parametrize("part", ["model.encoder", "model.decoder.layers"])
def test_a_model_plugged_in_part_saves_what_it_has(part: str, tmp_path: Path) -> None:
    case = ZOO["bart"]
    model, batch = case.model("sdpa").float(), case.batch()
    gfsa.plug(model.get_submodule(part))
    expected = randomised(model)(**batch)[0]
    model.save_pretrained(tmp_path)
    loaded = gfsa.from_pretrained(type(model), tmp_path).eval()
    assert torch.equal(loaded(**batch)[0], expected)
    assert list(gfsa.filters_of(loaded)) == list(gfsa.filters_of(model))


def test_a_state_dict_goes_into_the_same_kind_of_filter_only() -> None:
    model, other = model_of(), model_of()
    gfsa.plug(model, K=3, dropout_after="filter")
    gfsa.plug(other, K=4)
    with pytest.raises(ValueError, match=r"has a filter GFSA .*'K': 3.*this one is .*'K': 4"):
        other.load_state_dict(model.state_dict())
    gfsa.unplug(other)
    gfsa.plug(other, K=3)
    other.load_state_dict(model.state_dict())
    assert all(f.dropout_after == "filter" for f in gfsa.filters_of(other).values())


def test_a_filter_of_ones_own_is_the_same_in_a_script_and_in_what_imports_it() -> None:
    names = ("__main__", "trained")
    base = torch.tensor([0.0, 1.0])
    body = {
        "__init__": lambda self, heads: gfsa.GraphFilter.__init__(self, heads, base, torch.eye(2))
    }
    kinds = [type("Own", (gfsa.GraphFilter,), {**body, "__module__": name}) for name in names]
    model, other = model_of(), model_of()
    gfsa.plug(model, filter=kinds[0])
    gfsa.plug(other, filter=kinds[1])
    other.load_state_dict(randomised(model).state_dict())
    assert torch.equal(output(other), output(model))
    # a filter under the name of one of ours is still another one
    gfsa.unplug(other)
    gfsa.plug(other, filter=type("GFSA", (gfsa.GraphFilter,), {**body, "__module__": "trained"}))
    with pytest.raises(ValueError, match="plug the model as it was plugged"):
        other.load_state_dict(model.state_dict())
    assert "GFSA" not in {f.describe()["kind"] for f in gfsa.filters_of(other).values()}


def test_a_model_built_without_memory_is_given_its_numbers() -> None:
    model = model_of()
    gfsa.plug(model, K=3)
    expected = output(randomised(model))
    with torch.device("meta"):
        empty = transformers.BertForMaskedLM(model.config).double().eval()
    gfsa.plug(empty, K=3)
    state = model.state_dict() | dict(model.named_buffers())
    empty.load_state_dict(model.state_dict(), assign=True)
    for name, buffer in empty.named_buffers():
        if buffer.is_meta and not name.endswith(("base", "basis")):
            owner, _, last = name.rpartition(".")
            setattr(empty.get_submodule(owner), last, state[name])
    empty.tie_weights()
    assert torch.equal(output(empty), expected)


def test_whole_models_in_shards_and_half_precision(tmp_path: Path) -> None:
    model = model_of().bfloat16()
    gfsa.plug(model, K=3)
    expected = output(randomised(model))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = gfsa.from_pretrained(AutoModelForMaskedLM, tmp_path, dtype=torch.bfloat16).eval()
    assert torch.equal(output(loaded), expected)


def test_weights_of_other_files_than_the_filters_are_refused(tmp_path: Path) -> None:
    model = model_of()
    gfsa.plug(model, K=3)
    model.save_pretrained(tmp_path)
    for options in (
        {"use_safetensors": False},
        {"gguf_file": "model.gguf"},
        {"state_dict": model.state_dict()},
        {"output_loading_info": True},
    ):
        with pytest.raises(ValueError, match=f"leave out {next(iter(options))}"):
            gfsa.from_pretrained(AutoModelForMaskedLM, tmp_path, **options)


def test_transformers_alone_says_that_it_drops_the_filters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of().float()
    gfsa.plug(model)
    model.save_pretrained(tmp_path)
    gfsa.unplug(model)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        transformers.logging.set_verbosity_warning()
        plain = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
        assert "gfsa.theta" in caplog.text
        assert "UNEXPECTED" in caplog.text
        assert torch.equal(output(plain), output(model))
        caplog.clear()
        gfsa.from_pretrained(AutoModelForMaskedLM, tmp_path)
        assert "gfsa.theta" not in caplog.text
        # what else transformers has to say is still said
        gfsa.from_pretrained(AutoModelForSequenceClassification, tmp_path)
        assert "classifier.weight" in caplog.text
        assert "gfsa.theta" not in caplog.text
    finally:
        transformers.logging.set_verbosity_error()
        logger.removeHandler(caplog.handler)


def test_weights_of_four_bits_are_the_same_backbone(saved: Path) -> None:
    """Two numbers in each byte, as bitsandbytes packs them."""
    model = model_of()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            packed = torch.zeros(module.weight.numel() // 2, 1, dtype=torch.uint8)
            module.weight = torch.nn.Parameter(packed, requires_grad=False)
    gfsa.load(model, saved)
    assert gfsa.filters_of(model)
    other = transformers.BertModel(
        transformers.BertConfig(
            hidden_size=48, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64
        )
    )
    with pytest.raises(ValueError, match="another backbone"):
        gfsa.load(other, saved)


class TestAnotherKindOfFolder:
    """Filters are saved in three ways; the error of a wrong loader names the right one."""

    @pytest.fixture(scope="class")
    @staticmethod
    def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
        import peft

        folder = tmp_path_factory.mktemp("saved")
        model = model_of("gpt2")
        gfsa.plug(model, K=3)
        gfsa.save(model, folder / "filters")
        model.save_pretrained(folder / "model")
        config = peft.LoraConfig(
            target_modules=["c_attn"], modules_to_save=["gfsa"], fan_in_fan_out=True
        )
        peft.get_peft_model(model, config).save_pretrained(folder / "adapter")
        return {path.name: path for path in folder.iterdir()}

    def test_load_peft(self, folders: dict[str, Path]) -> None:
        for kind, advice in (("model", "gfsa.from_pretrained"), ("filters", "gfsa.load")):
            with pytest.raises(FileNotFoundError, match=rf"{advice}\(.*{kind}\"\) loads"):
                gfsa.load_peft(model_of("gpt2"), folders[kind])

    def test_from_pretrained(self, folders: dict[str, Path]) -> None:
        # transformers itself loads the base that an adapter names, and the adapter
        config = folders["adapter"] / "adapter_config.json"
        entries = json.loads(config.read_text(encoding="utf-8"))
        entries["base_model_name_or_path"] = str(folders["model"])
        config.write_text(json.dumps(entries), encoding="utf-8")
        with pytest.raises(FileNotFoundError, match=r"gfsa.load_peft\(.*adapter\"\) loads"):
            gfsa.from_pretrained(transformers.AutoModelForCausalLM, folders["adapter"])

    def test_what_is_missing_of_the_right_kind(self, folders: dict[str, Path]) -> None:
        (folders["adapter"] / "adapter_model.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match="save the adapter with"):
            gfsa.load_peft(model_of("gpt2"), folders["adapter"])


def test_other_weights_of_the_same_shapes_warn(tmp_path: Path) -> None:
    """The layers that differ are named; a cast is no difference."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2)
    plain = copy.deepcopy(model)
    gfsa.plug(model.requires_grad_(False))
    gfsa.save(model, tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gfsa.load(copy.deepcopy(plain).to(dtype), tmp_path)
    other = copy.deepcopy(plain)
    torch.nn.init.xavier_uniform_(other.layers[1].self_attn.in_proj_weight)
    with pytest.warns(UserWarning, match=r"other weights than layers\.1\.self_attn of"):
        gfsa.load(other, tmp_path)
    gfsa.unplug(other)
    damage(lambda d: [entry.pop("weights") for entry in d["filters"].values()])(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gfsa.load(other, tmp_path)


def test_save_says_that_a_trainable_backbone_is_not_saved(tmp_path: Path) -> None:
    model = torch.nn.TransformerEncoderLayer(16, 4, 32)
    gfsa.plug(model)
    with pytest.warns(UserWarning, match=r"filters alone; .* are not saved"):
        gfsa.save(model, tmp_path)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("gfsa" in name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gfsa.save(model, tmp_path)
