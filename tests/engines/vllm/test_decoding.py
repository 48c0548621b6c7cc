"""Greedy decoding in vLLM gives the tokens that transformers' generate gives.

In every mode 16 requests of different lengths run at once, 40 tokens each, in float32; the
log-probabilities of the generated tokens differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
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
    return made


@pytest.fixture(scope="module")
def check(architecture: str, checkpoint: Checkpoint, record: Any) -> Callable[..., None]:
    """Compares the first round of an engine with what transformers generates."""
    assert len(checkpoint.texts) == 16
    assert {len(text.tokens) for text in checkpoint.texts} == {40}

    def compare(mode: str, served: Served, more: str = "") -> None:
        difference = largest_difference(served.rounds[0].texts, checkpoint.texts)
        assert difference < TOLERANCE
        record(
            f"{architecture}, {mode}: 16 requests at once, 40 greedy tokens each",
            f"identical, log-probabilities within {difference:.0e}{more}",
        )

    return compare


def test_eager(checkpoint: Checkpoint, check: Any) -> None:
    check("eager", serve(checkpoint.folder, everything(checkpoint.prompts), **EAGER))


def test_compiled(checkpoint: Checkpoint, check: Any) -> None:
    options = {**EAGER, "enforce_eager": False}
    check("compiled", serve(checkpoint.folder, everything(checkpoint.prompts), **options))


def test_chunked_prefill_and_prefix_caching(checkpoint: Checkpoint, check: Any) -> None:
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
    again = served.rounds[1]
    assert again.cached >= 64
    expected = [text.first(10) for text in checkpoint.texts]
    assert largest_difference(again.texts, expected) < TOLERANCE
    hits = f"; again with {again.cached} prompt tokens from the cache: identical"
    check("chunked prefill, prefix caching", served, hits)


def test_ngram_speculation(checkpoint: Checkpoint, check: Any) -> None:
    served = serve(
        checkpoint.folder, everything(checkpoint.prompts), **EAGER, speculative_config=NGRAM
    )
    # accepted drafts, and rejected ones whose places in the cache were written again
    assert 0 < served.accepted < served.drafted
    drafts = f"; {served.accepted} of {served.drafted} drafted tokens accepted"
    check("n-gram speculation", served, drafts)


def test_two_processes(checkpoint: Checkpoint, check: Any) -> None:
    served = serve(
        checkpoint.folder, everything(checkpoint.prompts), **EAGER, tensor_parallel_size=2
    )
    check("tensor parallel 2", served)
