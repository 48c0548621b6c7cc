"""What the lens measures of a model, as numbers by depth; a report."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import gfsa
from gfsa.lens import LensReport, diagnose
from gfsa.lens.readings import ModelReading
from support.tiny import TinyEncoder, padded_batch

# sizes of a model of transformers, and of one with an encoder and a decoder of a layer each
SMALL = {
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
SMALL_PAIR = {"d_model": 32} | {
    f"{part}_{what}": size
    for part in ("encoder", "decoder")
    for what, size in {"layers": 1, "attention_heads": 4, "ffn_dim": 32}.items()
}


def only(report: Any) -> ModelReading:
    """The reading of a report of one model."""
    (reading,) = report.models.values()
    return reading


def diagnosed(model: nn.Module, inputs: Any, **options: Any) -> dict[int, float]:
    """Similarity by depth, 0 for the input, by :func:`gfsa.diagnose`."""
    reading = only(diagnose(model, inputs, attention=False, spectral=False, **options))
    return {feature.depth: feature.cosine for feature in reading.features}


def example_report(**options: bool) -> LensReport:
    """Three models: plain, with a filter in every layer, with one in some."""
    torch.manual_seed(0)
    models = {name: TinyEncoder(depth=4) for name in ("plain", "GFSA <all>", "twicing & some")}
    state = models["plain"].state_dict()
    for model in models.values():
        model.load_state_dict(state)
    gfsa.plug(models["GFSA <all>"], w0=[0.1, 0.2, 0.3, 0.4], wK=[-0.3, 0.0, 0.1, 0.5])
    gfsa.plug(models["twicing & some"], filter=gfsa.Twicing, layers="even")
    return diagnose(models, padded_batch([12, 9, 16]), **options)
