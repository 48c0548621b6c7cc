"""What vLLM cannot serve is refused when it starts, with what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from serving import engine
from tiny_models import VOCABULARY, build, randomise_filters

import gfsa
from gfsa import baselines
from gfsa.engines.vllm.checkpoint import descriptions_in


def parse(folder: Path) -> Any:
    """The config as vLLM reads it, with its plugins."""
    from vllm.plugins import load_general_plugins
    from vllm.transformers_utils.config import get_config

    load_general_plugins()
    return get_config(str(folder), trust_remote_code=False)


def saved(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    return folder


def plugged_llama(folder: Path) -> Path:
    model = build("Llama")
    gfsa.plug(model, K=3)
    randomise_filters(model)
    return saved(folder, model)


def test_a_checkpoint_without_filters_is_left_alone(tmp_path: Path) -> None:
    config = parse(saved(tmp_path, build("Llama")))
    assert config.architectures == ["LlamaForCausalLM"]
    assert not hasattr(config, "gfsa")


def test_a_plugged_checkpoint_names_its_class_and_its_filters(tmp_path: Path) -> None:
    config = parse(plugged_llama(tmp_path))
    assert config.architectures == ["GfsaTransformersForCausalLM"]
    assert config.gfsa["architectures"] == ["LlamaForCausalLM"]
    layers = [f"model.layers.{number}.self_attn" for number in range(3)]
    assert list(config.gfsa["filters"]) == layers
    assert config.gfsa["filters"][layers[0]]["kind"] == "GFSA"


def test_checkpoints_in_shards_are_read(tmp_path: Path) -> None:
    model = build("Llama")
    gfsa.plug(model, K=3)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert len(descriptions_in(tmp_path)) == 3


def test_folders_without_safetensors_have_no_filters(tmp_path: Path) -> None:
    assert descriptions_in(tmp_path) == {}


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    model = transformers.BertForMaskedLM(config)
    gfsa.plug(model, K=3)
    with pytest.raises(ValueError, match=r"BertForMaskedLM.*causal language models of text"):
        parse(saved(tmp_path, model))


def test_a_method_that_is_no_polynomial_is_refused(tmp_path: Path) -> None:
    model = build("Llama")
    baselines.apply(model, "attnscale")
    assert gfsa.filters_of(model)
    with pytest.raises(ValueError, match=r"AttnScale.*polynomials of the attention map"):
        parse(saved(tmp_path, model))


def change(folder: Path, edit: Any) -> Path:
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
    edit: Any, message: str, tmp_path: Path, vllm_cache: Path
) -> None:
    folder = change(plugged_llama(tmp_path), edit)
    with pytest.raises(ValueError, match=message), engine(folder, enforce_eager=True):
        pass


def test_a_filter_without_its_description_is_refused(tmp_path: Path) -> None:
    def undescribed(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[THETA.replace("theta", "_extra_state")]

    with pytest.raises(ValueError, match="without its description"):
        descriptions_in(change(plugged_llama(tmp_path), undescribed))
