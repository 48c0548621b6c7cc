"""Small random models with filters, saved as a user saves them, and what transformers generates.

Initial weights are large, so that a text does not repeat one token, and the filters differ from
head to head. Windows are shorter than the prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import gfsa

VOCABULARY = 96
NEW_TOKENS = 40
LENGTHS = (3, 7, 12, 17, 21, 26, 33, 38, 47, 52, 61, 64, 70, 83, 97, 130)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # vLLM's attention on CPUs has kernels for 32 and more
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WINDOW = {"sliding_window": 24}
_GEMMA = {
    **_WINDOW,
    "query_pre_attn_scalar": 32,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=128,
        n_layer=3,
        n_head=4,
        n_positions=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config)


def _experts() -> nn.Module:
    sizes = {**_SIZES, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))


MODELS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SIZES)),
    "Mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**_SIZES, **_WINDOW)
    ),
    "Gemma 2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**_SIZES, **_GEMMA)
    ),
    "Gemma 3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**_SIZES, **_GEMMA)
    ),
    "GPT-2": _gpt2,
    "Qwen3 MoE": _experts,
}


@dataclass
class Text:
    """One generated text: its tokens, and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]


@dataclass
class Checkpoint:
    """A plugged model in a folder, and what transformers generates with it."""

    folder: Path
    plain: Path
    """The same model without its filters."""
    prompts: list[list[int]]
    texts: list[Text] = field(default_factory=list)
    plain_texts: list[Text] = field(default_factory=list)


def build(architecture: str) -> Any:
    torch.manual_seed(0)
    return MODELS[architecture]().eval()


def randomise_filters(model: nn.Module, scale: float = 0.3) -> None:
    """Give every head numbers of its own, far from those of ordinary attention."""
    generator = torch.Generator().manual_seed(1)
    for filter in gfsa.filters_of(model).values():
        if filter.theta is not None:
            with torch.no_grad():
                filter.theta.copy_(scale * torch.randn(filter.theta.shape, generator=generator))


def prompts_of(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def plugged_checkpoint(architecture: str, folder: Path) -> Checkpoint:
    """Build, plug and save a model, load it again, and let transformers generate."""
    model = build(architecture)
    plain = folder.with_name(f"{folder.name} plain")
    model.save_pretrained(plain)
    report = gfsa.plug(model, K=3)
    assert len(report.plugged) == 3
    randomise_filters(model)
    model.save_pretrained(folder)
    checkpoint = Checkpoint(folder, plain, prompts_of())
    load = transformers.AutoModelForCausalLM.from_pretrained
    # eager: transformers' sdpa leaves out Gemma 2's soft cap
    checkpoint.plain_texts = texts_of(load(plain, attn_implementation="eager"), prompts_of()[:4])
    checkpoint.texts = texts_of(reference(folder), checkpoint.prompts)
    return checkpoint


def reference(folder: Path) -> Any:
    return gfsa.from_pretrained(
        transformers.AutoModelForCausalLM, folder, attn_implementation="eager"
    ).eval()


def texts_of(model: Any, prompts: list[list[int]], new: int = NEW_TOKENS) -> list[Text]:
    """What transformers generates greedily, all prompts in one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    rows: Tensor = torch.stack(out.logits, dim=1).float().log_softmax(-1)
    tokens = out.sequences[:, longest:]
    logprobs = rows.gather(-1, tokens[..., None])[..., 0]
    return [Text(*pair) for pair in zip(tokens.tolist(), logprobs.tolist(), strict=True)]
