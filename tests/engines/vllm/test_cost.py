"""What filters cost in vLLM: tokens that fit into the cache, and tokens a second."""

from __future__ import annotations

from typing import Any

import pytest
from serving import everything, serve

# key heads, query heads: of two query heads a key head, and of one each
HEADS = {"Llama": (2, 4), "GPT-2": (4, 4)}


def measure(folder: Any, prompts: list[list[int]]) -> tuple[int, float]:
    """How many tokens fit into the cache, and how many are generated a second."""
    served = serve(
        folder,
        # the first requests start what is started once
        (prompts, 2),
        *[everything(prompts)] * 3,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    # the fastest of three: other programs on the machine only make it slower
    speeds = [sum(len(t.tokens) for t in r.texts) / r.seconds for r in served.rounds[1:]]
    return served.capacity, max(speeds)


@pytest.mark.parametrize("architecture", HEADS)
def test_the_cache_holds_fewer_tokens_as_documented(
    architecture: str, checkpoints: Any, record: Any
) -> None:
    checkpoint = checkpoints(architecture)
    plain, plain_speed = measure(checkpoint.plain, checkpoint.prompts)
    plugged, plugged_speed = measure(checkpoint.folder, checkpoint.prompts)
    keys, queries = HEADS[architecture]
    # degree 2: one more layer, with a key head for each query head
    assert plain / plugged == pytest.approx((keys + queries) / keys, rel=0.01)
    kind = f"{queries // keys} query heads a key head"
    record("memory", f"{plain / plugged:.1f} times the cache a token ({kind})")
    record("time", f"{plain_speed / plugged_speed:.2f} times a token ({kind}, eager)")
    record(
        f"{architecture}: tokens that fit into 1 GiB of cache, plain and plugged",
        f"{plain:,} and {plugged:,}",
    )
    record(
        f"{architecture}: tokens/s of 16 requests, plain and plugged",
        f"{plain_speed:.0f} and {plugged_speed:.0f}",
    )
