"""Greedy decoding in vLLM gives the tokens that transformers' generate gives.

In every mode 16 requests of different lengths run at once, 40 tokens each, in float32; the
log-probabilities of the generated tokens differ by rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
from serving import Served, everything, largest_difference, serve
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
def checkpoint(request: pytest.FixtureRequest, checkpoints: Any) -> Checkpoint:
    made: Checkpoint = checkpoints(request.param)
    # a filter that changed nothing, or texts of one token, would hide an error
    changed = [a.tokens != b.tokens for a, b in zip(made.texts, made.plain_texts, strict=False)]
    assert len(changed) == 4
    assert all(changed)
    assert min(len(set(text.tokens)) for text in made.texts) > 5
    return made


def check(served: Served, checkpoint: Checkpoint) -> None:
    assert len(checkpoint.texts) == 16
    assert {len(text.tokens) for text in checkpoint.texts} == {40}
    assert largest_difference(served.rounds[0].texts, checkpoint.texts) < TOLERANCE


def test_eager(checkpoint: Checkpoint) -> None:
    check(serve(checkpoint.folder, everything(checkpoint.prompts), **EAGER), checkpoint)


def test_compiled(checkpoint: Checkpoint) -> None:
    options = {**EAGER, "enforce_eager": False}
    check(serve(checkpoint.folder, everything(checkpoint.prompts), **options), checkpoint)


def test_chunked_prefill_and_prefix_caching(checkpoint: Checkpoint) -> None:
    served = serve(
        checkpoint.folder,
        everything(checkpoint.prompts),
        # the same prompts again: whole blocks of the longer ones come from the cache
        (checkpoint.prompts, 10),
        enforce_eager=True,
        enable_prefix_caching=True,
        # fewer tokens a step than most prompts have: prompts come in chunks, beside decoding
        max_num_batched_tokens=24,
    )
    check(served, checkpoint)
    again = served.rounds[1]
    assert again.cached >= 64
    expected = [text.first(10) for text in checkpoint.texts]
    assert largest_difference(again.texts, expected) < TOLERANCE


def test_ngram_speculation(checkpoint: Checkpoint) -> None:
    served = serve(
        checkpoint.folder, everything(checkpoint.prompts), **EAGER, speculative_config=NGRAM
    )
    check(served, checkpoint)
    # accepted drafts, and rejected ones whose places in the cache were written again
    assert 0 < served.accepted < served.drafted


def test_two_processes(checkpoint: Checkpoint) -> None:
    served = serve(
        checkpoint.folder, everything(checkpoint.prompts), **EAGER, tensor_parallel_size=2
    )
    check(served, checkpoint)
