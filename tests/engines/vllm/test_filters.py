"""Filters of every kind and degree, on some layers, are read from the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import engine, generate, largest_difference
from tiny_models import build, prompts_of, randomise_filters, reference, texts_of

import gfsa
from gfsa.filters.partial import PartialPolynomial

PROMPTS = prompts_of((5, 40, 70))
TOLERANCE = 1e-5

# three layers each; None is a layer without a filter
KINDS: dict[str, list[Callable[[int], gfsa.GraphFilter] | None]] = {
    "learned": [
        lambda heads: gfsa.GFSA(heads, K=5, learn=("wK",), w0=[0.1, -0.2, 0.3, 0.0]),
        lambda heads: gfsa.GFSA(heads, K=4, power="exact", lr_multiplier=0.5),
        None,
    ],
    "polynomials": [
        lambda heads: gfsa.Polynomial(heads, degree=1),
        lambda heads: gfsa.Polynomial(heads, degree=0),
        lambda heads: PartialPolynomial(heads, degree=3, high=[0, 2]),
    ],
    "fixed": [gfsa.Twicing, None, lambda heads: gfsa.PageRank(heads, alpha=0.2, hops=3)],
}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_every_kind(kinds: list[Any], tmp_path: Path, vllm_cache: Path) -> None:
    model = build("Llama")
    for number, kind in enumerate(kinds, start=1):
        if kind is not None:
            part = model.model.layers[number - 1]
            gfsa.plug(part, filter=kind)
    randomise_filters(model)
    model.save_pretrained(tmp_path)
    loaded = reference(tmp_path)
    assert len(gfsa.filters_of(loaded)) == sum(kind is not None for kind in kinds)
    expected = texts_of(loaded, PROMPTS, new=12)
    with engine(tmp_path, enforce_eager=True, max_num_batched_tokens=24) as llm:
        texts, _ = generate(llm, PROMPTS, new=12)
    assert largest_difference(texts, expected) < TOLERANCE


def test_experts(tmp_path: Path, vllm_cache: Path) -> None:
    model = build("Qwen3 MoE")
    gfsa.plug(model, K=3, layers="odd")
    randomise_filters(model)
    model.save_pretrained(tmp_path)
    expected = texts_of(reference(tmp_path), PROMPTS, new=12)
    with engine(tmp_path, enforce_eager=True) as llm:
        texts, _ = generate(llm, PROMPTS, new=12)
    assert largest_difference(texts, expected) < TOLERANCE


def test_filters_stay_in_float32_in_a_bfloat16_model(tmp_path: Path, vllm_cache: Path) -> None:
    import torch

    model = build("Llama").to(torch.bfloat16)
    gfsa.plug(model, K=3)
    randomise_filters(model)
    model.save_pretrained(tmp_path)
    saved = [filter.coefficients() for filter in gfsa.filters_of(model).values()]
    with engine(tmp_path, enforce_eager=True, dtype="bfloat16") as llm:
        served = llm.apply_model(_coefficients)[0]
        texts, _ = generate(llm, PROMPTS, new=4)
    assert all(len(set(text.logprobs)) > 1 for text in texts)
    for ours, theirs in zip(saved, served, strict=True):
        assert theirs.dtype == torch.float32
        assert torch.equal(ours, theirs)


def _coefficients(model: Any) -> list[Any]:
    return [layer.self_attn.gfsa.coefficients.clone() for layer in model.model.layers]
