"""Continuous batching of every kind of decoder: the tokens of ``generate``, and what they cost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import transformers as hf

import gfsa
from support.batching import (
    DECODERS,
    SECTORS,
    by_batching,
    by_generate,
    bytes_of,
    decoder,
    greedy,
    prompts,
)
from support.cost import time_ratio

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
    # since 5.19 transformers updates the cache outside of the graph, filters or not
    compiled = hf.CompileConfig(backend="aot_eager", fullgraph=not SECTORS, dynamic=True)
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
    how = "compiled, padded" if SECTORS else "compiled without a graph break, padded"
    record(f"{name}: {how}", "identical")


@pytest.mark.parametrize("name", ["llama", "llama, grouped queries"])
def test_what_it_costs(name: str, record: Record) -> None:
    filtered, plain = decoder(name), decoder(name)
    gfsa.unplug(plain)
    sizes = [size_of_cache(model) for model in (filtered, plain)]
    inputs = prompts(*LENGTHS)
    time = time_ratio(
        lambda: by_batching(filtered, inputs), lambda: by_batching(plain, inputs), rounds=7
    )
    heads = "as many key heads" if name == "llama" else "half as many key heads"
    record("memory", f"{sizes[0] / sizes[1]:.2g}× a token ({heads})")
    record("time", f"{time:.2f}× a batch of 5 requests, 40 tokens each ({heads})")
    assert sizes[0] / sizes[1] == (1.5 if name == "llama" else 2.0)
    assert time < 3


def size_of_cache(model: Any) -> int:
    """Bytes of a model's paged cache, with the powers that it stores."""
    manager = model.init_continuous_batching(
        greedy(), hf.ContinuousBatchingConfig(num_blocks=16, block_size=4, max_batch_tokens=8)
    )
    cache = manager._create_batch_processor().cache
    model.set_attn_implementation("sdpa")
    return bytes_of(cache)
