"""Tiny plugged models of transformers for tests of training."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import gfsa
from support.random_filters import randomise
from support.zoo import ZOO

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
