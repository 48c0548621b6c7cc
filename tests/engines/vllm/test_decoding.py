"""Greedy decoding in vLLM gives the tokens that transformers' generate gives.

Every architecture in every mode: 16 requests of different lengths run at once, 40 tokens each, in
float32; the log-probabilities of the generated tokens differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from serving import Engine, Round, largest_difference
from tiny_models import ARCHITECTURES, Checkpoint

TOLERANCE = 1e-5

EAGER: dict[str, Any] = {"enforce_eager": True, "enable_prefix_caching": False}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@pytest.fixture(params=ARCHITECTURES, scope="module")
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(architecture: str, checkpoints: Any) -> Checkpoint:
    made: Checkpoint = checkpoints(architecture)
    # a filter that changed nothing, or texts of one token, would hide an error
    changed = [a.tokens != b.tokens for a, b in zip(made.texts, made.plain_texts, strict=False)]
    assert len(changed) == 4
    assert all(changed)
    assert min(len(set(text.tokens)) for text in made.texts) > 5
    assert len({len(prompt) for prompt in made.prompts}) == 16
    assert [len(text.tokens) for text in made.texts] == [40] * 16
    return made


@pytest.fixture(scope="module")
def check(architecture: str, checkpoint: Checkpoint, record: Any) -> Callable[..., None]:
    """Compares what an engine generated with what transformers generates."""

    def compare(mode: str, found: Round, more: str = "") -> None:
        difference = largest_difference(found.texts, checkpoint.texts)
        assert difference < TOLERANCE
        record(
            f"{architecture}, {mode}",
            f"16 requests of 40 tokens identical, log-probabilities within {difference:.0e}{more}",
        )

    return compare


def test_eager(checkpoint: Checkpoint, check: Any) -> None:
    with Engine(checkpoint.folder, **EAGER) as engine:
        found, counted = engine.generate(checkpoint.prompts), engine.counters()
    # vLLM compiles the log-probabilities of tokens, the model must not be compiled
    assert counted.compiled < 30
    # one step a token: all requests are in every step
    assert found.steps == 40
    check("eager, 16 requests at once", found, f"; {found.steps} steps")


def test_compiled(checkpoint: Checkpoint, check: Any) -> None:
    with Engine(checkpoint.folder, **{**EAGER, "enforce_eager": False}) as engine:
        found, counted = engine.generate(checkpoint.prompts), engine.counters()
    # the model: an engine that falls back to eager mode would give the same tokens
    assert counted.compiled > 100
    check("compiled", found)


def test_chunked_prefill_and_prefix_caching(checkpoint: Checkpoint, check: Any) -> None:
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
    check("chunked prefill", first, f"; {prompt_tokens} prompt tokens, at most 24 tokens a step")
    assert again.cached >= 64
    check("prefix-cache hits", again, f"; {again.cached:.0f} prompt tokens from the cache")


def test_ngram_speculation(checkpoint: Checkpoint, check: Any) -> None:
    with Engine(checkpoint.folder, **EAGER, speculative_config=NGRAM) as engine:
        found, counted = engine.generate(checkpoint.prompts), engine.counters()
    # accepted drafts, and rejected ones whose places in the cache were written again
    assert 0 < counted.accepted < counted.drafted
    drafts = f"; {counted.accepted:.0f} of {counted.drafted:.0f} drafted tokens accepted"
    check("n-gram speculation", found, drafts)


def test_two_processes(checkpoint: Checkpoint, check: Any) -> None:
    with Engine(checkpoint.folder, **EAGER, tensor_parallel_size=2) as engine:
        check("tensor parallel 2", engine.generate(checkpoint.prompts))
