"""vLLM gives the tokens of ``generate`` with every way of serving and every kind of filter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import Engine, Round, largest_difference
from tiny_models import ARCHITECTURES, NEW_TOKENS, SERVED, VARIED, Checkpoint

TOLERANCE = 1e-5

EAGER: dict[str, Any] = {"enforce_eager": True, "enable_prefix_caching": False}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@pytest.fixture(params=SERVED, scope="module")
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(architecture: str, checkpoints: Any) -> Checkpoint:
    made: Checkpoint = checkpoints(architecture)
    # a filter that changed nothing, or texts of one token, would hide an error
    changed = [a.tokens != b.tokens for a, b in zip(made.texts, made.plain_texts, strict=False)]
    assert len(changed) == 4
    assert all(changed)
    assert min(len(set(text.tokens)) for text in made.texts) >= VARIED
    assert len({len(prompt) for prompt in made.prompts}) == 16
    assert [len(text.tokens) for text in made.texts] == [40] * 16
    return made


def check(checkpoint: Checkpoint, found: Round, new: int = NEW_TOKENS) -> None:
    """An engine generated what transformers generates."""
    expected = [text.first(new) for text in checkpoint.texts]
    assert largest_difference(found.texts, expected) < TOLERANCE


def test_eager(checkpoint: Checkpoint) -> None:
    with Engine(checkpoint.folder, **EAGER) as engine:
        found, counted = engine.generate(checkpoint.prompts), engine.counters()
    # vLLM compiles the log-probabilities of tokens, the model must not be compiled
    assert counted.compiled < 30
    # one step a token: all requests are in every step
    assert found.steps == 40
    check(checkpoint, found)


def test_compiled(checkpoint: Checkpoint) -> None:
    with Engine(checkpoint.folder, **{**EAGER, "enforce_eager": False}) as engine:
        found, counted = engine.generate(checkpoint.prompts), engine.counters()
    # the model: an engine that falls back to eager mode would give the same tokens
    assert counted.compiled > 100
    check(checkpoint, found)


def test_chunked_prefill_and_prefix_caching(checkpoint: Checkpoint) -> None:
    with Engine(
        checkpoint.folder,
        enforce_eager=True,
        enable_prefix_caching=True,
        # fewer tokens a step than most prompts have: prompts come in chunks, beside decoding
        max_num_batched_tokens=24,
    ) as engine:
        first = engine.generate(checkpoint.prompts)
        # the same prompts again: whole blocks of the longer ones come from the cache
        again = engine.generate(checkpoint.prompts)
    prompt_tokens = sum(map(len, checkpoint.prompts))
    assert first.cached == 0
    assert first.steps > prompt_tokens / 24
    check(checkpoint, first)
    assert again.cached >= 64
    check(checkpoint, again)


def test_ngram_speculation(checkpoint: Checkpoint) -> None:
    with Engine(checkpoint.folder, **EAGER, speculative_config=NGRAM) as engine:
        found, counted = engine.generate(checkpoint.prompts), engine.counters()
    # accepted drafts, and rejected ones whose places in the cache were written again
    assert 0 < counted.accepted < counted.drafted
    check(checkpoint, found)


def test_two_processes(checkpoint: Checkpoint) -> None:
    with Engine(checkpoint.folder, **EAGER, tensor_parallel_size=2) as engine:
        check(checkpoint, engine.generate(checkpoint.prompts))


NEW = 12


KINDS = ("learned", "polynomials", "fixed", "exclusive", "depth", "soft cap", "experts")


@pytest.mark.parametrize("recipe", KINDS)
def test_every_kind(recipe: str, checkpoints: Any) -> None:
    checkpoint = checkpoints(recipe)
    with Engine(checkpoint.folder, enforce_eager=True, max_num_batched_tokens=24) as engine:
        check(checkpoint, engine.generate(checkpoint.prompts, NEW), NEW)


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


def test_a_checkpoint_in_several_files(checkpoints: Any, tmp_path: Path) -> None:
    checkpoint: Checkpoint = checkpoints("Llama")
    write_in_several_files(checkpoint, tmp_path)
    with Engine(tmp_path, enforce_eager=True) as engine:
        check(checkpoint, engine.generate(checkpoint.prompts))


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


ROUNDS = 5
# key heads, query heads: two query heads a key head, or one
HEADS = dict.fromkeys(ARCHITECTURES, (2, 4)) | {"GPT-2": (4, 4)}
# vLLM groups layers with a window and layers without, and fills groups up: not in proportion
MIXED = ("Gemma 3",)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cost(architecture: str, checkpoints: Any, record_testsuite_property: Any) -> None:
    checkpoint = checkpoints(architecture)
    options = {"enforce_eager": True, "enable_prefix_caching": False}
    with (
        Engine(checkpoint.folder, **options) as plugged,
        Engine(checkpoint.plain, **options) as plain,
    ):
        fewer = plain.counters().capacity / plugged.counters().capacity
        for engine in (plugged, plain):
            # the first requests start what is started once
            engine.generate(checkpoint.prompts, 2)
        # in turns: what slows the machine for a while slows both
        rounds = [
            [engine.generate(checkpoint.prompts).seconds for engine in (plugged, plain)]
            for _ in range(ROUNDS)
        ]
    keys, queries = HEADS[architecture]
    # degree 2: one more layer, with a key head for each query head
    expected = (keys + queries) / keys
    assert fewer == pytest.approx(expected, rel=0.05 if architecture in MIXED else 0.01)
    if architecture in ("Llama", "GPT-2"):
        kind = f"{architecture}, {queries} query heads, {keys} key heads"
        record_testsuite_property("memory", f"{fewer:.1f} times the cache a token ({kind})")
        slower = median(filtered / unfiltered for filtered, unfiltered in rounds)
        record_testsuite_property("time", f"{slower:.2f} times a token ({architecture}, eager)")
