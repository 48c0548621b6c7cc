"""Filters of every kind and degree, on all layers or on some, are read from the checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import Engine, largest_difference
from tiny_models import Checkpoint

TOLERANCE = 1e-5
NEW = 12


KINDS = {
    "learned": "K = 5 learned in part, exact K = 4, a layer without a filter",
    "polynomials": "polynomials of degree 0 and 1, a pruned one of degree 3",
    "fixed": "twicing, the Laplacian, PageRank of three hops",
    "exclusive": "the exclusive term alone, beside K = 3, beside a polynomial of degree 0",
    "soft cap": "capped attention scores (Gemma 2), K = 3 on all layers",
    "experts": "a mixture of experts (Qwen3 MoE), filters on odd layers",
}


@pytest.mark.parametrize("recipe", KINDS)
def test_every_kind(recipe: str, checkpoints: Any, record: Any) -> None:
    checkpoint = checkpoints(recipe)
    with Engine(checkpoint.folder, enforce_eager=True, max_num_batched_tokens=24) as engine:
        found = engine.generate(checkpoint.prompts, NEW)
    expected = [text.first(NEW) for text in checkpoint.texts]
    difference = largest_difference(found.texts, expected)
    assert difference < TOLERANCE
    record(f"{KINDS[recipe]}: 16 requests", f"identical, log-probabilities within {difference:.0e}")


def write_in_several_files(checkpoint: Checkpoint, folder: Path) -> None:
    """The checkpoint as a trainer exports it that writes floating-point numbers only.

    The weights and θ in two files, what the filters are in a third, and an index of all three.
    """
    tensors = load_file(checkpoint.folder / "model.safetensors")
    described = [name for name in tensors if name.endswith("._extra_state")]
    weights = [name for name in tensors if name not in described]
    files = {
        "model-00001-of-00002.safetensors": weights[::2],
        "model-00002-of-00002.safetensors": weights[1::2],
        "gfsa-descriptions.safetensors": described,
    }
    assert len(described) == 3
    for file, names in files.items():
        part = {name: tensors[name] for name in names}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copyfile(checkpoint.folder / "config.json", folder / "config.json")


def test_a_checkpoint_in_several_files(checkpoints: Any, tmp_path: Path, record: Any) -> None:
    checkpoint: Checkpoint = checkpoints("Llama")
    write_in_several_files(checkpoint, tmp_path)
    with Engine(tmp_path, enforce_eager=True) as engine:
        found = engine.generate(checkpoint.prompts)
    difference = largest_difference(found.texts, checkpoint.texts)
    assert difference < TOLERANCE
    record(
        "Llama in two files of weights and `gfsa-descriptions.safetensors`, with their index",
        f"16 requests of 40 tokens identical, log-probabilities within {difference:.0e}",
    )


def test_coefficients_are_float32_in_a_bfloat16_model(checkpoints: Any) -> None:
    folder = checkpoints("bfloat16").folder
    saved = load_file(folder / "model.safetensors")
    with Engine(folder, enforce_eager=True, dtype="bfloat16") as engine:
        found = engine.coefficients()
    assert len(found) == 3
    for layer, coefficients, dtype in found:
        theta = saved[f"{layer}.gfsa.theta"]
        assert dtype == str(theta.dtype) == "torch.float32"
        # K = 3: c0 = w0, c1 = w1 − wK, c2 = 2·wK, where θ is the difference to (0, 1, 0)
        w0, w1, wK = theta.unbind(-1)
        expected = torch.stack([w0, 1 + w1 - wK, 2 * wK], dim=-1)
        torch.testing.assert_close(torch.tensor(coefficients), expected, rtol=1e-6, atol=1e-7)
