"""Tiny random transformers models for tests that look closer than the census does at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
import transformers as hf
from torch import Tensor, nn

import gfsa
from census.catalogue import build_transformers
from support.plugging import randomise

VOCABULARY = 61
LENGTH = 10
SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}
"""Sizes under the names that most configs of transformers have for them."""


@dataclass(frozen=True)
class Case:
    """A model, and what is known of it."""

    kind: str
    """The model type, of which the census builds a tiny model."""
    inputs: Callable[[], dict[str, Tensor]]
    layers: int
    """Self-attention layers that can be plugged."""
    skipped: int = 0
    causal: bool = False
    generates: bool = False
    padded: bool = False
    """Whether the inputs have an attention_mask with padding on the right."""
    implementations: tuple[str, ...] = ("sdpa", "eager")
    dtype: torch.dtype = torch.float64
    eager_single: bool = False
    """Whether its eager attention takes the softmax in float32 whatever the model's dtype."""
    fields: dict[str, Any] = field(default_factory=dict)
    """What this model's config has that the census' has not."""
    single: bool = False
    """Whether the model computes in float32 inside (rotary tables, norms, softmax), so that two
    ways of computing the same in float64 differ by float32's rounding."""

    def model(self, implementation: str) -> Any:
        torch.manual_seed(0)
        built = build_transformers(self.kind, self.fields, attn_implementation=implementation)
        model: Any = built.to(self.dtype).eval()
        assert model.config._attn_implementation == implementation
        return model

    def batch(self) -> dict[str, Tensor]:
        return {
            name: x.to(self.dtype) if x.is_floating_point() else x
            for name, x in self.inputs().items()
        }

    def tolerance(self, implementation: str) -> float:
        single = self.single or (self.eager_single and implementation == "eager")
        return 2e-6 if single else 1e-12


def text(padding: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=_generator())
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if padding:
        mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def text_pair() -> dict[str, Tensor]:
    decoder = torch.randint(3, VOCABULARY, (2, 7), generator=_generator())
    return {**text(), "decoder_input_ids": decoder}


def image(size: int = 16, channels: int = 3) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, channels, size, size, generator=_generator())}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


# tokens without a meaning of their own, and no end of a text
_OPEN = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None}
_DECODER = {"causal": True, "generates": True, "padded": True}
_PAIR = {"skipped": 2, "generates": True, "padded": True}
_SWIN = {"image_size": 16, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}

ZOO: dict[str, Case] = {
    "bert": Case("bert", text, 2, padded=True, fields={"vocab_size": VOCABULARY}),
    "gpt2": Case("gpt2", text, 2, **_DECODER, fields=_OPEN),
    "vit": Case("vit", image, 2, eager_single=True, fields={"image_size": 16, "patch_size": 4}),
    "swin": Case("swin", image, 4, single=True, fields=_SWIN),
    "bart": Case("bart", text_pair, 4, **_PAIR, fields={"forced_eos_token_id": None}),
    "t5": Case("t5", text_pair, 4, **_PAIR, single=True, fields={"decoder_start_token_id": 0}),
    "llama": Case(
        "llama", text, 2, **_DECODER, single=True, fields={**_OPEN, "num_key_value_heads": 2}
    ),
    "mistral": Case(
        "mistral", text, 2, **_DECODER, single=True, fields={**_OPEN, "sliding_window": 4}
    ),
    "gemma2": Case(
        "gemma2",
        text,
        2,
        **_DECODER,
        single=True,
        fields={**_OPEN, "sliding_window": 4},
        # transformers since 5.18 refuses sdpa, which leaves the cap of the scores out
        implementations=("sdpa", "eager") if hf.Gemma2Model._supports_sdpa else ("eager",),
    ),
    "gpt_oss": Case(
        "gpt_oss",
        text,
        2,
        **_DECODER,
        single=True,
        fields={
            **_OPEN,
            "sliding_window": 4,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        implementations=("eager",),
        # its experts have no float64 kernel
        dtype=torch.float32,
    ),
}


transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

MODELS = ("bert", "gpt2", "vit", "llama")
_ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout")
_OTHER_DROPOUT = ("hidden_dropout_prob", "resid_pdrop", "embd_pdrop")


def configuration(name: str) -> Any:
    return copy.deepcopy(ZOO[name].model("sdpa").config)


def plugged(
    name: str,
    dropout: float | None = None,
    implementation: str = "sdpa",
    layers: int = 2,
) -> Any:
    """A tiny float32 model with filters that do something, in evaluation mode."""
    torch.manual_seed(0)
    config = configuration(name)
    for option in _ATTENTION_DROPOUT + _OTHER_DROPOUT:
        if dropout is not None and hasattr(config, option):
            setattr(config, option, dropout)
    config.num_hidden_layers = layers
    config._attn_implementation = implementation
    model = type(ZOO[name].model(implementation))(config).eval()
    assert model.config._attn_implementation == implementation
    gfsa.plug(model, K=3)
    randomise(model)
    return model


def batch_for(name: str) -> dict[str, Tensor]:
    return ZOO[name].inputs()


def learned(model: nn.Module) -> dict[str, Tensor]:
    return {name: f.theta.detach().clone() for name, f in gfsa.filters_of(model).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def gradients(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model(**batch)[0].square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
