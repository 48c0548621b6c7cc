"""What filters cost in vLLM: tokens that fit into the cache, and tokens a second.

Seconds are those of one processor core in the engine's process, so that other programs on the
machine count as little as possible.
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from typing import Any

import pytest
from serving import Engine
from tiny_models import ARCHITECTURES, NEW_TOKENS

ROUNDS = 5
# key heads, query heads: two query heads a key head, or one
HEADS = dict.fromkeys(ARCHITECTURES, (2, 4)) | {"GPT-2": (4, 4)}
# vLLM groups layers with a window and layers without, and fills groups up: not in proportion
MIXED = ("Gemma 3",)
UNPLUGGED, BACKEND, PLUGGED = "unplugged", "unplugged in the Transformers backend", "plugged"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cost(architecture: str, checkpoints: Any, record: Any) -> None:
    checkpoint = checkpoints(architecture)
    served: dict[str, tuple[Any, dict[str, str]]] = {
        UNPLUGGED: (checkpoint.plain, {}),
        PLUGGED: (checkpoint.folder, {}),
    }
    if architecture == "Llama":
        # a plugged Llama runs in the Transformers backend, which has a cost of its own; an
        # unplugged one in vLLM's own class
        served[BACKEND] = (checkpoint.plain, {"model_impl": "transformers"})
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                Engine(folder, enforce_eager=True, enable_prefix_caching=False, **options)
            )
            for name, (folder, options) in served.items()
        }
        capacity = {name: engine.counters().capacity for name, engine in engines.items()}
        for engine in engines.values():
            # the first requests start what is started once
            engine.generate(checkpoint.prompts, 2)
        # in turns: what slows the machine for a while slows all of them
        rounds = [
            {name: engine.generate(checkpoint.prompts).seconds for name, engine in engines.items()}
            for _ in range(ROUNDS)
        ]
    keys, queries = HEADS[architecture]
    fewer = capacity[UNPLUGGED] / capacity[PLUGGED]
    # degree 2: one more layer, with a key head for each query head
    expected = (keys + queries) / keys
    assert fewer == pytest.approx(expected, rel=0.05 if architecture in MIXED else 0.01)
    record(
        f"{architecture}: tokens that fit into 1 GiB of cache",
        f"{capacity[PLUGGED]:,} plugged, {capacity[UNPLUGGED]:,} unplugged: 1/{fewer:.2f}",
    )
    tokens = NEW_TOKENS * len(checkpoint.prompts)
    speed = {name: median(tokens / seconds[name] for seconds in rounds) for name in engines}
    slower = {
        name: median(seconds[PLUGGED] / seconds[name] for seconds in rounds) for name in engines
    }
    record(
        f"{architecture}: tokens/s of 16 requests, eager, one core",
        f"{speed[PLUGGED]:.0f} plugged, "
        + ", ".join(
            f"{speed[name]:.0f} {name} ({slower[name]:.2f} times the time)"
            for name in engines
            if name != PLUGGED
        ),
    )
    if architecture in ("Llama", "GPT-2"):
        kind = f"{architecture}, {queries} query heads, {keys} key heads"
        record("memory", f"{fewer:.1f} times the cache a token ({kind})")
        record("time", f"{slower[UNPLUGGED]:.2f} times a token ({architecture}, eager)")
