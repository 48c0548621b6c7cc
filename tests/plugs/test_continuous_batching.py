"""Continuous batching of a plugged model is refused, whichever way it is started."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import transformers as hf

import gfsa

hf.logging.set_verbosity_error()
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)

SIZES = {"vocab_size": 61, "hidden_size": 32}
LLAMA = hf.LlamaConfig(
    **SIZES,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=64,
)
# its attention is traced
GPT_NEO = hf.GPTNeoConfig(**SIZES, num_layers=2, num_heads=4, attention_types=[[["global"], 2]])


def plugged(config: Any) -> Any:
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    gfsa.plug(model, K=None)
    return model


REFUSED = pytest.raises(
    NotImplementedError, match=r"continuous batching .* expected .*generate\(\).* with vLLM"
)


@pytest.mark.parametrize("config", [LLAMA, GPT_NEO], ids=["interface", "traced"])
def test_it_is_refused_before_anything_starts(config: Any) -> None:
    model = plugged(config)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with REFUSED:
            each.generate_batch([[5, 6]])
        with REFUSED:
            each.init_continuous_batching()
    gfsa.unplug(model)
    assert "init_continuous_batching" not in model.__dict__


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_manager_that_is_built_otherwise_has_the_reason_in_its_results(
    implementation: str,
) -> None:
    model = plugged(LLAMA)
    model.set_attn_implementation(implementation)
    manager = type(model).init_continuous_batching(
        model,
        hf.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0),
        hf.ContinuousBatchingConfig(num_blocks=80, block_size=4, max_batch_tokens=64),
    )
    manager.start()
    manager.add_request([5, 6, 7], eos_token_id=-1)
    error = manager.get_result(timeout=30).error
    manager.stop()
    assert "serve it with vLLM" in error
