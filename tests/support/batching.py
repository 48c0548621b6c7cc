"""Tiny plugged decoders, and their greedy tokens by continuous batching and by ``generate``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers.generation.continuous_batching.cache import PagedAttentionCache

import gfsa
from support.zoo import randomise

# since transformers 5.19 the paged cache is one tensor of sectors
SECTORS = hasattr(PagedAttentionCache, "perform_cache_copy")
VOCABULARY = 61
NEW = 40

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    # tied, or with small weights, a random model repeats one token whatever its attention does
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
_ROTARY = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}
_WINDOW = {**_ROTARY, "sliding_window": 6}

DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**{**_ROTARY, "num_key_value_heads": 4})),
    "llama, grouped queries": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_ROTARY)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_ROTARY)),
    "mistral, sliding window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_WINDOW)),
    "gemma 3, both kinds of layers": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            **{**_WINDOW, "num_hidden_layers": 4},
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**_TEXT)),
}


def of_degree_1(heads: int) -> gfsa.GraphFilter:
    return gfsa.Polynomial(heads, degree=1)


def decoder(
    name: str, implementation: str = "sdpa", filter: Any = of_degree_1, **arguments: Any
) -> Any:
    """A random decoder with random filters, whose greedy choice is never a close one."""
    torch.manual_seed(0)
    model = DECODERS[name]().eval()
    model.set_attn_implementation(implementation)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    gfsa.plug(model, filter=filter, **arguments)
    randomise(model)
    with torch.no_grad():
        # the largest logits of a random model are closer to one another than rounding may decide
        model.get_output_embeddings().weight.mul_(20)
    return model


def prompts(*lengths: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def by_generate(model: Any, inputs: list[list[int]], new: int = NEW) -> list[list[int]]:
    """Greedy tokens of each prompt, by ``generate`` and its own cache."""
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return [
        model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in inputs
    ]


def by_batching(
    model: Any, inputs: list[list[int]], new: int = NEW, **settings: Any
) -> list[list[int]]:
    """Greedy tokens of each prompt, by continuous batching; raises what it raised in its thread."""
    results = model.generate_batch(
        inputs,
        generation_config=greedy(new),
        continuous_batching_config=hf.ContinuousBatchingConfig(
            **{"num_blocks": 80, "block_size": 4, "max_batch_tokens": 64, **settings}
        ),
    )
    assert len(results) == len(inputs)
    for result in results.values():
        assert result.error is None, result.error
    return [result.generated_tokens for result in results.values()]


def greedy(new: int = NEW, **options: Any) -> Any:
    return hf.GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0, **options
    )
