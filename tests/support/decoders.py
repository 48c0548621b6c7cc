"""Small random decoders of transformers, of sizes that a test chooses."""

from __future__ import annotations

from typing import Any

import torch
import transformers


def decoder(
    kind: str,
    *,
    width: int,
    heads: int,
    key_heads: int,
    layers: int,
    vocabulary: int,
    positions: int,
    window: int | None = None,
) -> Any:
    """``"gpt2"``, ``"llama"``, or ``"mistral"``, which has a window. No token ends a text."""
    torch.manual_seed(0)
    common = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":
        sizes = {"n_layer": layers, "n_head": heads, "n_embd": width, "n_positions": positions}
        config = transformers.GPT2Config(**sizes, **common)
        return transformers.GPT2LMHeadModel(config).eval()
    sizes = {
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": positions,
    }
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, **common)
        return transformers.LlamaForCausalLM(config).eval()
    config = transformers.MistralConfig(**sizes, **common, sliding_window=window)
    return transformers.MistralForCausalLM(config).eval()
