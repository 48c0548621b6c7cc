"""torchtitan: the same losses however a model is distributed, and exports for transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cpu import use_cpu
from safetensors.torch import save_file
from torch import Tensor, nn

import gfsa

use_cpu()

import runs  # noqa: E402
import tiny  # noqa: E402
from torchtitan.models.common.attention import GQAttention  # noqa: E402
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter  # noqa: E402
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import gfsa.titan  # noqa: E402
from gfsa.titan import add_filters  # noqa: E402

ADAPTERS = {"llama": Llama3StateDictAdapter, "qwen": Qwen3StateDictAdapter}


def built(config: Trainer.Config, seed: int = 0) -> Any:
    """The model of a configuration in this process, as the trainer builds it on one."""
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    model.init_weights(buffer_device=None)
    return model.eval()


def with_noise(model: nn.Module, scale: float = 0.2) -> nn.Module:
    """Filters that differ from the identity, from head to head and from layer to layer."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".gfsa." in name:
            nn.init.normal_(parameter, std=scale)
    return model


@torch.no_grad()
def logits(model: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    return model(tokens, positions, model.get_attention_masks(positions))


@pytest.fixture(scope="module")
def rows() -> tuple[Tensor, Tensor]:
    tokens, positions = zip(*(tiny.document_row(row) for row in range(2)), strict=True)
    return torch.stack(tokens)[:, :-1], torch.stack(positions)


@dataclass
class Study:
    """A configuration of ``tiny.py``, its assets, a checkpoint with filters, and a run from it."""

    config: str
    assets: Path
    seed: Path
    one_process: runs.Run


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Study]:
    """Configuration → its study, made when it is asked for."""

    @cache
    def made(config: str) -> Study:
        folder = tmp_path_factory.mktemp(config)
        (assets := folder / "assets").mkdir()
        tiny.write_assets(assets, config)
        seed = runs.seed(folder / "seed", assets, config)
        alone = runs.train(folder / "one", config, assets, load=seed, checkpoint=("load_only",))
        return Study(config, assets, seed, alone)

    return made


@pytest.fixture
def llama(study: Callable[[str], Study]) -> Study:
    return study("llama")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, study: Callable[[str], Study]) -> Path:
    """The seed as a transformers folder, written by two processes that shard it."""
    of = study("llama")
    return runs.export(tmp_path_factory.mktemp("exported"), of.assets, of.seed, processes=2)


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_a_fresh_filter_changes_nothing(name: str, rows: tuple[Tensor, Tensor]) -> None:
    plain = built(getattr(tiny, name)())
    config = getattr(tiny, name)()
    assert len(gfsa.titan.plug(config, K=3)) == tiny.LAYERS
    filtered = built(config)
    missing, unexpected = filtered.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert len(missing) == 2 * tiny.LAYERS
    assert torch.equal(logits(filtered, *rows), logits(plain, *rows))
    assert not torch.allclose(logits(with_noise(filtered), *rows), logits(plain, *rows), atol=1e-2)


@pytest.mark.parametrize("filter", [{"K": 3}, {"filter": "Polynomial", "degree": 3}])
def test_packed_documents_do_not_see_each_other(
    filter: dict[str, Any], rows: tuple[Tensor, Tensor]
) -> None:
    config = tiny.llama()
    gfsa.titan.plug(config, **filter)
    model = with_noise(built(config))
    tokens, positions = rows[0][:1], rows[1][:1]
    packed = logits(model, tokens, positions)
    (start,) = (int(place) for place in (positions[0] == 0).nonzero()[1:])
    for part in (slice(None, start), slice(start, None)):
        alone = logits(model, tokens[:, part], positions[:, part])
        torch.testing.assert_close(packed[:, part], alone, atol=2e-6, rtol=1e-5)


def test_packed_documents_by_varlen_attention(rows: tuple[Tensor, Tensor]) -> None:
    by_flex, by_varlen = tiny.llama(), tiny.llama("varlen")
    for config in (by_flex, by_varlen):
        gfsa.titan.plug(config, filter="Polynomial", degree=3)
    expected = logits(with_noise(built(by_flex)), *rows)
    # torchtitan rounds the inputs of varlen attention to bfloat16
    found = logits(with_noise(built(by_varlen)), *rows)
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_transformers_computes_the_same(
    name: str, rows: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    config = getattr(tiny, name)()
    gfsa.titan.plug(config, layers="even", filter="Polynomial", degree=3)
    model = with_noise(built(config))
    adapter = ADAPTERS[name](config.model_spec.model, None)
    descriptions = add_filters(adapter)
    renamed = adapter.to_hf(model.state_dict())
    saved = {key: value.contiguous() for key, value in (renamed | descriptions).items()}
    save_file(saved, tmp_path / "model.safetensors")
    tiny.write_assets(tmp_path, name)
    loaded = load(tmp_path)
    assert list(gfsa.filters_of(loaded)) == [f"model.layers.{layer}.self_attn" for layer in (1, 3)]
    tokens = rows[0]
    alone = torch.arange(tiny.LENGTH).expand_as(tokens)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(tokens).logits, logits(model, tokens, alone), atol=2e-5, rtol=1e-4
        )
    back = adapter.from_hf(renamed)
    own = {key: x for key, x in model.state_dict().items() if not key.endswith("_extra_state")}
    assert back.keys() == own.keys()
    assert all(torch.equal(back[key], own[key]) for key in own)


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return gfsa.from_pretrained(AutoModelForCausalLM, folder).eval()


def test_an_adapter_without_names_for_attention_is_refused() -> None:
    class Unknown:
        from_hf_map: dict[str, str] = {}  # noqa: RUF012

    with pytest.raises(ValueError, match="Unknown has no name for layers"):
        add_filters(Unknown())


def test_filters_have_the_file_of_their_layer(tmp_path: Path) -> None:
    config = tiny.llama()
    gfsa.titan.plug(config, layers=[2])

    def files() -> dict[str, int] | None:
        adapter = Llama3StateDictAdapter(config.model_spec.model, str(tmp_path))
        add_filters(adapter)
        return adapter.fqn_to_index_mapping

    assert files() is None
    weights = {
        f"model.layers.{layer}.self_attn.o_proj.weight": f"model-0000{layer + 1}-of-00004"
        for layer in range(4)
    }
    expected = {name: int(file[10]) for name, file in weights.items()}
    filter = "model.layers.{}.self_attn.gfsa.{}"
    expected[filter.format(1, "theta")] = 2
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    assert files() == expected
    # of a folder with filters in other layers
    for name in ("theta", "_extra_state"):
        weights[filter.format(3, name)] = "model-00004-of-00004"
    index.write_text(json.dumps({"weight_map": weights}))
    assert files() == expected


def test_seed_has_filters_of_every_head(llama: Study) -> None:
    model = loaded_from(llama.seed)
    thetas = torch.stack([value for key, value in model.state_dict().items() if "theta" in key])
    assert thetas.shape == (tiny.LAYERS, 4, 3)
    # θ begins at 0; in four steps one of a head may come back close to it, most do not
    moved = thetas.abs().amax(-1)
    assert moved.min() > 0
    assert moved.median() > 0.05
    assert len(thetas.unique(dim=1)[0]) == 4


def loaded_from(checkpoint: Path) -> Any:
    config = tiny.llama()
    gfsa.titan.plug(config, K=3)
    model = built(config, seed=7)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=str(checkpoint), no_dist=True)
    model.load_state_dict(state)
    return model


def test_filters_have_a_rate_of_their_own(llama: Study) -> None:
    of_filters, rest = llama.one_process.groups
    assert (of_filters["lr"], of_filters["weight_decay"]) == (0.05, 0.0)
    assert (rest["lr"], rest["weight_decay"]) == (3e-3, 0.1)
    assert of_filters["names"] == [
        f"layers.{layer}.attention.gfsa.theta" for layer in range(tiny.LAYERS)
    ]
    assert not any("gfsa" in name for name in rest["names"])


TENSOR = "--parallelism.tensor_parallel_degree"
CONTEXT = "--parallelism.context_parallel_degree"
PIPELINE = "--parallelism.pipeline_parallel_degree"
BATCH = "--training.local_batch_size"
LAYOUTS = {
    "FSDP2": (2, (BATCH, "2")),
    "TP2": (2, (TENSOR, "2")),
    "TP2 without sequence parallelism": (
        2,
        (TENSOR, "2", "--parallelism.no-enable_sequence_parallel"),
    ),
    "FSDP2 × TP2": (4, (BATCH, "2", TENSOR, "2")),
    "CP2": (2, (CONTEXT, "2")),
    "PP2": (2, (PIPELINE, "2")),
    "compiled": (1, ("--compile.enable",)),
    "full activation checkpointing": (1, ("activation-checkpoint:full",)),
    "no activation checkpointing": (1, ("activation-checkpoint:none",)),
    "backend spmd_types": (1, ("--parallelism.spmd_backend", "spmd_types")),
}


@pytest.mark.parametrize(
    ("config", "layout"),
    [("llama", layout) for layout in LAYOUTS]
    + [("untied_qwen", layout) for layout in ("FSDP2", "TP2", "CP2", "PP2", "compiled")],
)
def test_losses_do_not_depend_on_the_layout(
    config: str, layout: str, tmp_path: Path, study: Callable[[str], Study]
) -> None:
    of, (processes, arguments) = study(config), LAYOUTS[layout]
    begin = {"load": of.seed, "checkpoint": ("load_only",)}
    run = runs.train(tmp_path, config, of.assets, *arguments, **begin, processes=processes)
    check_agreement(run, of.one_process)


def check_agreement(run: runs.Run, one_process: runs.Run) -> None:
    """Losses and gradient norms are those of one process."""
    assert run.losses == pytest.approx(one_process.losses, abs=1e-5)
    assert run.norms == pytest.approx(one_process.norms, rel=1e-4)


def test_an_export_is_the_checkpoint(
    llama: Study, exported: Path, rows: tuple[Tensor, Tensor]
) -> None:
    tokens = rows[0]
    alone = torch.arange(tiny.LENGTH).expand_as(tokens)
    with torch.no_grad():
        torch.testing.assert_close(
            load(exported)(tokens).logits,
            logits(loaded_from(llama.seed), tokens, alone),
            atol=2e-5,
            rtol=1e-4,
        )


def test_training_goes_on_from_an_export(tmp_path: Path, exported: Path, llama: Study) -> None:
    # torchtitan loads from hf_assets_path, whose index names filters too
    run = runs.train(
        tmp_path, "llama", exported, checkpoint=("initial_load_in_hf", "last_save_in_hf")
    )
    check_agreement(run, llama.one_process)
    again, before = load(run.checkpoint(3)), load(exported)
    assert gfsa.filters_of(again).keys() == gfsa.filters_of(before).keys()
    moved = [
        (now.theta - then.theta).abs().max()
        for now, then in zip(
            gfsa.filters_of(again).values(), gfsa.filters_of(before).values(), strict=True
        )
    ]
    assert 1e-2 < min(moved) <= max(moved) < 0.2


def test_an_export_of_other_filters_is_refused(
    tmp_path: Path, llama: Study, exported: Path
) -> None:
    begin = {"load": exported, "checkpoint": ("initial_load_in_hf",)}
    with pytest.raises(RuntimeError, match=r"'K': 3.* the model's is GFSA .*'K': 4"):
        runs.train(tmp_path, "llama", llama.assets, filters=runs.overrides(K=4), **begin)


def test_a_transformers_folder_without_filters_is_a_start(
    tmp_path: Path, llama: Study, exported: Path
) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(exported).save_pretrained(tmp_path / "plain")
    begin = {"load": tmp_path / "plain", "checkpoint": ("load_only", "initial_load_in_hf")}
    run = runs.train(tmp_path / "run", "llama", llama.assets, **begin, steps=1)
    assert "has no graph filters: they start as configured" in run.output
    assert run.losses != pytest.approx(llama.one_process.losses[:1], abs=1e-3)


def test_a_configuration_of_ones_own(tmp_path: Path, llama: Study) -> None:
    run = runs.train(tmp_path, "upper_llama", llama.assets, filters=(), steps=2)
    assert run.losses[1] != run.losses[0]
    assert [name for group in run.groups for name in group["names"] if "gfsa" in name] == [
        "layers.2.attention.gfsa.theta",
        "layers.3.attention.gfsa.theta",
    ]


def test_torchtitans_checkpoint_manager_is_warned_of(tmp_path: Path, llama: Study) -> None:
    options = {"filters": runs.overrides()[:2], "checkpoint": ("last_save_in_hf",)}
    run = runs.train(tmp_path, "llama", llama.assets, **options, steps=1)
    assert run.output.count("Add gfsa.titan.checkpoint to --override.imports") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filter": "Cubic"}, "filter must be one of"),
        ({"K": 1}, "K must be"),
        ({"layers": [9]}, "there is no layer 9"),
    ],
)
def test_wrong_arguments_are_refused_with_the_configuration(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        gfsa.titan.plug(tiny.llama(), **arguments)


def test_another_version_of_its_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.llama()
    gfsa.titan.plug(config)
    monkeypatch.setattr(GQAttention, "forward", lambda self, x: self.gate(x))
    with pytest.raises(ValueError, match=r"written for torchtitan 0\.3.* differs in .*gate"):
        built(config)


def test_a_model_is_plugged_once() -> None:
    config = tiny.llama()
    gfsa.titan.plug(config)
    with pytest.raises(ValueError, match="has no GQAttention without a filter"):
        gfsa.titan.plug(config)


def test_cost(rows: tuple[Tensor, Tensor], costs: Any) -> None:
    config = tiny.llama()
    gfsa.titan.plug(config, K=3)
    plain, filtered = built(tiny.llama()), with_noise(built(config))

    def step(model: Any) -> None:
        model(*rows, model.get_attention_masks(rows[1])).logsumexp(-1).mean().backward()

    of = "a forward and backward (256 tokens, SDPA with a mask in place of flex attention)"
    costs(step, filtered, plain, of)
