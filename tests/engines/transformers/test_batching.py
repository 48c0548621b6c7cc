"""Continuous batching of every kind of decoder: the tokens of ``generate``, and what they cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import transformers as hf

import gfsa
from support.batching import DECODERS, by_batching, by_generate, decoder, greedy, prompts

hf.logging.set_verbosity_error()
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)

Record = Callable[[str, str], None]
LENGTHS = (5, 11, 3, 17, 9)


@pytest.mark.parametrize("name", DECODERS)
def test_the_tokens_are_those_of_generate(name: str, record: Record) -> None:
    inputs = prompts(*LENGTHS)
    for implementation in ("sdpa", "eager"):
        model = decoder(name, implementation)
        expected = by_generate(model, inputs)
        for most in (64, 8):
            assert by_batching(model, inputs, max_batch_tokens=most) == expected
        gfsa.unplug(model)
        assert by_generate(model, inputs) != expected
    record(
        f"{name}: 5 requests, 40 greedy tokens, 8 and 64 tokens a batch, sdpa and eager",
        "identical",
    )


@pytest.mark.parametrize("name", ["llama, grouped queries", "gemma 3, both kinds of layers"])
@pytest.mark.parametrize(
    "filter",
    [gfsa.PageRank, lambda heads: gfsa.Polynomial(heads, degree=1)],
    ids=["degree 4", "degree 1"],
)
def test_other_degrees(name: str, filter: Any) -> None:
    model = decoder(name, filter=filter)
    inputs = prompts(*LENGTHS)
    assert by_batching(model, inputs, max_batch_tokens=8) == by_generate(model, inputs)


def test_layers_of_different_degrees_and_layers_without_a_filter() -> None:
    model = decoder("gemma 3, both kinds of layers", filter=gfsa.PageRank, layers=[2])
    gfsa.plug(model, K=3, layers=[3])
    list(gfsa.filters_of(model).values())[-1].theta.data.normal_(std=0.3)
    inputs = prompts(*LENGTHS)
    assert by_batching(model, inputs, max_batch_tokens=8) == by_generate(model, inputs)


def test_a_pruned_model() -> None:
    model = decoder("llama, grouped queries")
    for layer in gfsa.filters_of(model).values():
        layer.theta.data[:2, 2] = 0.0
    gfsa.prune(model, tolerance=1e-6)
    inputs = prompts(*LENGTHS)
    assert by_batching(model, inputs, max_batch_tokens=8) == by_generate(model, inputs)


@pytest.mark.parametrize("name", ["llama, grouped queries", "gemma 3, both kinds of layers"])
def test_compiled_with_padding(name: str, record: Record) -> None:
    model = decoder(name)
    inputs = prompts(5, 11)
    compiled = hf.CompileConfig(backend="aot_eager", fullgraph=True, dynamic=True)
    found = by_batching(
        model,
        inputs,
        new=10,
        max_batch_tokens=16,
        varlen_compile_config=compiled,
        q_padding_interval_size=8,
        kv_padding_interval_size=16,
    )
    assert found == by_generate(model, inputs, new=10)
    record(f"{name}: compiled without a graph break, padded", "identical")


@pytest.mark.parametrize("name", ["llama", "llama, grouped queries"])
def test_what_it_costs(name: str, record: Record) -> None:
    sizes, seconds = {}, {}
    inputs = prompts(*LENGTHS)
    for plugged in (True, False):
        model = decoder(name)
        if not plugged:
            gfsa.unplug(model)
        manager = model.init_continuous_batching(
            greedy(), hf.ContinuousBatchingConfig(num_blocks=16, block_size=4, max_batch_tokens=8)
        )
        cache = manager._create_batch_processor().cache
        tensors = [*cache.key_cache, *cache.value_cache]
        tensors += cache.gfsa_powers.tensors if plugged else []
        sizes[plugged] = sum(x.numel() * x.element_size() for x in tensors)
        model.set_attn_implementation("sdpa")
        taken = []
        for _ in range(5):
            begun = time.perf_counter()
            by_batching(model, inputs)
            taken.append(time.perf_counter() - begun)
        seconds[plugged] = min(taken)
    record("memory", f"{name}: {sizes[True] / sizes[False]:.2g}×")
    record("time", f"{name}: {seconds[True] / seconds[False]:.2f}×")
    assert sizes[True] / sizes[False] == (1.5 if name == "llama" else 2.0)
