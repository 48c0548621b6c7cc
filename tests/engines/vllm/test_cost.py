"""What filters cost in vLLM: tokens that fit into the cache, and tokens a second."""

from __future__ import annotations

import time
from typing import Any

import pytest
from serving import engine, generate

# key heads, query heads: of two query heads a key head, and of one each
HEADS = {"Llama": (2, 4), "GPT-2": (4, 4)}


def measure(folder: Any, prompts: list[list[int]]) -> tuple[int, float]:
    """How many tokens fit into the cache, and how many are generated a second."""
    with engine(folder, enforce_eager=True, enable_prefix_caching=False) as llm:
        cache = llm.llm_engine.vllm_config.cache_config
        generate(llm, prompts, new=2)
        start = time.perf_counter()
        texts, _ = generate(llm, prompts)
        seconds = time.perf_counter() - start
        generated = sum(len(text.tokens) for text in texts)
        return cache.kv_cache_size_tokens, generated / seconds


@pytest.mark.parametrize("architecture", HEADS)
def test_the_cache_holds_fewer_tokens_as_documented(architecture: str, checkpoints: Any) -> None:
    checkpoint = checkpoints(architecture)
    plain, plain_speed = measure(checkpoint.plain, checkpoint.prompts)
    plugged, plugged_speed = measure(checkpoint.folder, checkpoint.prompts)
    keys, queries = HEADS[architecture]
    # degree 2: one more layer, with a key head for each query head
    assert plain / plugged == pytest.approx((keys + queries) / keys, rel=0.01)
    print(f"{architecture}: {plain_speed:.0f} tokens/s plain, {plugged_speed:.0f} plugged")
