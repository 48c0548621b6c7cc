"""Filters of every kind and degree, on all layers or on some, are read from the checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from serving import Engine, largest_difference

TOLERANCE = 1e-5
NEW = 12


KINDS = {
    "learned": "K = 5 learned in part, exact K = 4, a layer without a filter",
    "polynomials": "polynomials of degree 0 and 1, a pruned one of degree 3",
    "fixed": "twicing, PageRank of three hops, a layer without a filter",
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
