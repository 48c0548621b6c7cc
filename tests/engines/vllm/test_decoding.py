"""Greedy decoding in vLLM gives the tokens that transformers' generate gives.

In every mode 16 requests of different lengths run at once, 40 tokens each, in float32; the
log-probabilities of the generated tokens differ by rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
from serving import counter, engine, generate, largest_difference
from tiny_models import Text

ARCHITECTURES = ("Llama", "Qwen3", "Mistral", "Gemma 2", "Gemma 3", "GPT-2")
TOLERANCE = 1e-5

EAGER: dict[str, Any] = {"enforce_eager": True, "enable_prefix_caching": False}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@pytest.fixture(params=ARCHITECTURES, scope="module")
def checkpoint(request: pytest.FixtureRequest, checkpoints):
    made = checkpoints(request.param)
    # a filter that changed nothing, or texts of one token, would hide an error
    changed = [a.tokens != b.tokens for a, b in zip(made.texts, made.plain_texts, strict=False)]
    assert len(changed) == 4
    assert all(changed)
    assert min(len(set(text.tokens)) for text in made.texts) > 5
    return made


def check(llm: Any, checkpoint: Any) -> float:
    texts, _ = generate(llm, checkpoint.prompts)
    difference = largest_difference(texts, checkpoint.texts)
    assert difference < TOLERANCE
    return difference


def test_eager(checkpoint) -> None:
    with engine(checkpoint.folder, **EAGER) as llm:
        check(llm, checkpoint)


def test_compiled(checkpoint) -> None:
    with engine(checkpoint.folder, **{**EAGER, "enforce_eager": False}) as llm:
        check(llm, checkpoint)


def test_chunked_prefill_and_prefix_caching(checkpoint) -> None:
    # fewer tokens a step than most prompts have: prompts come in chunks, beside decoding
    with engine(checkpoint.folder, enforce_eager=True, max_num_batched_tokens=24) as llm:
        check(llm, checkpoint)
        # the same prompts again: whole blocks of the longer ones come from the cache
        texts, cached = generate(llm, checkpoint.prompts, new=10)
        assert cached >= 64
        expected = [Text(text.tokens[:10], text.logprobs[:10]) for text in checkpoint.texts]
        assert largest_difference(texts, expected) < TOLERANCE


def test_ngram_speculation(checkpoint) -> None:
    with engine(
        checkpoint.folder, **EAGER, speculative_config=NGRAM, disable_log_stats=False
    ) as llm:
        check(llm, checkpoint)
        accepted = counter(llm, "spec_decode_num_accepted_tokens")
        drafted = counter(llm, "spec_decode_num_draft_tokens")
        # accepted drafts, and rejected ones whose places in the cache were written again
        assert 0 < accepted < drafted


def test_two_processes(checkpoint) -> None:
    with engine(checkpoint.folder, **EAGER, tensor_parallel_size=2) as llm:
        check(llm, checkpoint)
