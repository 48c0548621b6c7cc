"""Continuous batching with filters of degree 1: the tokens of ``generate``, and what they cost."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import transformers as hf

import gfsa
from support.batching import DECODERS, SECTORS, by_batching, by_generate, decoder, prompts
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


def test_layers_without_a_filter() -> None:
    model = decoder("gemma 3, both kinds of layers", layers=[2])
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


def test_what_it_costs(record: Record) -> None:
    filtered, plain = decoder("llama"), decoder("llama")
    gfsa.unplug(plain)
    inputs = prompts(*LENGTHS)
    time = time_ratio(
        lambda: by_batching(filtered, inputs), lambda: by_batching(plain, inputs), rounds=7
    )
    record("memory", "that of the plain model (degree 1)")
    record("time", f"{time:.2f}× a batch of 5 requests, 40 tokens each (degree 1)")
    assert time < 2
