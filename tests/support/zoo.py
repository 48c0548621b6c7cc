"""Tiny random transformers models for tests that look closer than the census does at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import transformers as hf
from torch import Tensor, nn

import gfsa

VOCABULARY = 61
LENGTH = 10

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_ROTARY = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}
_ROTARY.pop("pad_token_id")


@dataclass(frozen=True)
class Case:
    """A model, and what is known of it."""

    build: Callable[[str], nn.Module]
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
    single: bool = False
    """Whether the model computes in float32 inside (rotary tables, norms, softmax), so that two
    ways of computing the same in float64 differ by float32's rounding."""

    def model(self, implementation: str) -> Any:
        torch.manual_seed(0)
        model = self.build(implementation).to(self.dtype).eval()
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


def _made(model: str, config: str, **options: Any) -> Callable[[str], nn.Module]:
    def build(implementation: str) -> nn.Module:
        built: nn.Module = getattr(hf, model)._from_config(
            getattr(hf, config)(**options), attn_implementation=implementation
        )
        return built

    return build


_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}


def _mel() -> dict[str, Tensor]:
    features = torch.randn(2, 8, 20, generator=_generator())
    decoder = torch.randint(3, VOCABULARY, (2, 7), generator=_generator())
    return {"input_features": features, "decoder_input_ids": decoder}


ZOO: dict[str, Case] = {
    # the paper's backbones
    "bert": Case(_made("BertForMaskedLM", "BertConfig", **_TEXT), text, 2, padded=True),
    "albert": Case(
        _made("AlbertForMaskedLM", "AlbertConfig", **_TEXT, embedding_size=16),
        text,
        1,
        padded=True,
    ),
    "roberta": Case(_made("RobertaForMaskedLM", "RobertaConfig", **_TEXT), text, 2, padded=True),
    "gpt2": Case(
        _made(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=None,
        ),
        text,
        2,
        causal=True,
        generates=True,
        padded=True,
    ),
    "vit": Case(_made("ViTModel", "ViTConfig", **_VIT), image, 2, eager_single=True),
    "deit": Case(_made("DeiTModel", "DeiTConfig", **_VIT), image, 2, eager_single=True),
    "swin": Case(
        _made(
            "SwinModel",
            "SwinConfig",
            image_size=16,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        image,
        4,
        single=True,
    ),
    "bart": Case(
        _made("BartForConditionalGeneration", "BartConfig", **_BART),
        text_pair,
        4,
        skipped=2,
        generates=True,
        padded=True,
    ),
    "plbart": Case(
        _made("PLBartForConditionalGeneration", "PLBartConfig", **_BART),
        text_pair,
        4,
        skipped=2,
        generates=True,
        padded=True,
    ),
    "t5": Case(
        _made(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=2,
        ),
        text_pair,
        4,
        skipped=2,
        generates=True,
        padded=True,
        single=True,
    ),
    # today's
    "llama": Case(
        _made("LlamaForCausalLM", "LlamaConfig", **_ROTARY),
        text,
        2,
        causal=True,
        generates=True,
        padded=True,
        single=True,
    ),
    "mistral": Case(
        _made("MistralForCausalLM", "MistralConfig", **_ROTARY, sliding_window=4),
        text,
        2,
        causal=True,
        generates=True,
        padded=True,
        single=True,
    ),
    "gemma2": Case(
        _made("Gemma2ForCausalLM", "Gemma2Config", **_ROTARY, sliding_window=4),
        text,
        2,
        causal=True,
        generates=True,
        padded=True,
        single=True,
        # transformers since 5.18 refuses sdpa, which leaves the cap of the scores out
        implementations=("sdpa", "eager") if hf.Gemma2Model._supports_sdpa else ("eager",),
    ),
    "gpt_oss": Case(
        _made(
            "GptOssForCausalLM",
            "GptOssConfig",
            **_ROTARY,
            sliding_window=4,
            num_local_experts=2,
            num_experts_per_tok=1,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        text,
        2,
        causal=True,
        generates=True,
        padded=True,
        implementations=("eager",),
        # its experts have no float64 kernel
        dtype=torch.float32,
        single=True,
    ),
    "modernbert": Case(
        _made(
            "ModernBertForMaskedLM",
            "ModernBertConfig",
            **_TEXT,
            global_attn_every_n_layers=2,
            # wide enough that no row sees padding alone: in float64 that is NaN in the model itself
            local_attention=8,
        ),
        text,
        2,
        padded=True,
        single=True,
    ),
    "whisper": Case(
        _made(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **{k: v for k, v in _BART.items() if k != "max_position_embeddings"},
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=32,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        _mel,
        4,
        skipped=2,
    ),
}


def randomise(model: nn.Module, scale: float = 0.3) -> None:
    """Give every filter in ``model`` that learns a random θ."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, gfsa.GraphFilter) and module.theta is not None:
                theta = torch.randn(module.theta.shape, generator=generator)
                module.theta.copy_(theta * scale)


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
