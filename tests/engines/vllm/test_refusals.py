"""What vLLM cannot serve is refused when it starts, with what to do about it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import Engine, EngineError
from tiny_models import Checkpoint

from gfsa.engines.vllm.config import descriptions_in


def parse(folder: Path) -> Any:
    """The config as vLLM reads it, with its plugins."""
    from vllm.plugins import load_general_plugins
    from vllm.transformers_utils.config import get_config

    load_general_plugins()
    return get_config(str(folder), trust_remote_code=False)


def test_a_checkpoint_without_filters_is_left_alone(checkpoints: Any) -> None:
    config = parse(checkpoints("Llama").plain)
    assert config.architectures == ["LlamaForCausalLM"]
    assert not hasattr(config, "gfsa")


def test_a_plugged_checkpoint_names_its_class_and_its_filters(checkpoints: Any) -> None:
    config = parse(checkpoints("Llama").folder)
    assert config.architectures == ["GfsaTransformersForCausalLM"]
    assert config.gfsa["architectures"] == ["LlamaForCausalLM"]
    layers = [f"model.layers.{number}.self_attn" for number in range(3)]
    assert list(config.gfsa["filters"]) == layers
    assert config.gfsa["filters"][layers[0]]["kind"] == "GFSA"


def test_folders_without_safetensors_have_no_filters(tmp_path: Path) -> None:
    assert descriptions_in(tmp_path) == {}


def test_names_of_the_hub_are_looked_up_in_its_cache(checkpoints: Any, tmp_path: Path) -> None:
    for name in ("plugged", "plain"):
        repository = tmp_path / f"models--user--{name}"
        shutil.copytree(checkpoints("Llama").folder.with_name(name), repository / "snapshots" / "1")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("1")
    code = (
        "from gfsa.engines.vllm.config import descriptions_in as found\n"
        "print(*(len(found(f'user/{name}')) for name in ('plugged', 'plain', 'missing')))"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    # vLLM logs to the standard output, too
    assert done.stdout.splitlines()[-1].split() == ["3", "0", "0"]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("encoder", r"BertForMaskedLM.*causal language models of text"),
        ("own class", r"OwnFilter.*polynomials of the attention map"),
    ],
)
def test_models_and_filters_that_are_refused(recipe: str, message: str, checkpoints: Any) -> None:
    with pytest.raises(ValueError, match=message):
        parse(checkpoints(recipe).folder)


def test_the_depth_term_over_several_processes() -> None:
    """A head of values that processes share; and pipeline stages, which have no first layer."""
    code = """
from types import SimpleNamespace
import pytest, torch, gfsa
from torch import nn
from gfsa.engines.vllm import models
from gfsa.engines.vllm.layers import ServedFilter

filter = gfsa.GFSA(4).add_depth()
nn.init.normal_(filter.theta)
served = ServedFilter(filter, (2, 2), 1, 4, "layer")
torch.testing.assert_close(served.r, filter.depth().mean()[None])
served = ServedFilter(filter, (2, 2), 1, 2, "layer")
torch.testing.assert_close(served.r, filter.depth()[2:].mean()[None])

model = nn.ModuleList([nn.Module(), nn.Module()])
for module, r in zip(model, (None, served.r)):
    module.attn = SimpleNamespace(filter=SimpleNamespace(r=r))
models.get_pp_group = lambda: SimpleNamespace(world_size=2)
# the last of these is a later stage with one filter, whose first layer is in another process
for filtered in (["0", "1"], ["1"]):
    with pytest.raises(ValueError, match="depth term.*without pipeline parallelism"):
        models._share_first_values(model, filtered, "my-model")
models.get_pp_group = lambda: SimpleNamespace(world_size=1)
with pytest.raises(ValueError, match="depth term in 1, its first layer with a filter"):
    models._share_first_values(model, ["1"], "my-model")
"""
    # vLLM changes transformers, from which the other tests make models
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_config_without_architectures_is_refused(checkpoints: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints("Llama").folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"no architectures.*this llama is.*ForCausalLM"):
        parse(folder)


def change(checkpoint: Checkpoint, folder: Path, edit: Any) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(checkpoint.folder, folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


THETA = "model.layers.1.self_attn.gfsa.theta"


def not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[THETA][0, 0] = float("nan")


def missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[THETA]


def other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[THETA] = tensors[THETA][:2].clone()


def other_heads(tensors: dict[str, torch.Tensor]) -> None:
    name = THETA.replace("theta", "_extra_state")
    description = json.loads(bytes(tensors[name].tolist()))
    description["arguments"]["num_heads"] = 8
    tensors[name] = torch.tensor(list(json.dumps(description).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (not_finite, "θ of .*layers.1.* not finite"),
        (missing, "no θ for them"),
        (other_shape, r"shape \(4, 3\), got torch.float32 of shape \(2, 3\)"),
        (other_heads, "a filter for 8 heads, .*has 4"),
    ],
)
def test_damaged_filters_are_refused(
    edit: Any, message: str, checkpoints: Any, tmp_path: Path
) -> None:
    folder = change(checkpoints("Llama"), tmp_path, edit)
    with pytest.raises(EngineError, match=message), Engine(folder, enforce_eager=True):
        pass


def test_a_filter_without_its_description_is_refused(checkpoints: Any, tmp_path: Path) -> None:
    def undescribed(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[THETA.replace("theta", "_extra_state")]

    with pytest.raises(ValueError, match="without its description"):
        descriptions_in(change(checkpoints("Llama"), tmp_path, undescribed))
