"""Presets of plug: the published settings for each backbone."""

from __future__ import annotations

from typing import Any

from torch import nn

# the published code learns wK alone, from zero. K is an option there for the language models;
# the value here is the default of its scripts. Dropout acts on A before it is squared in the
# BERT and GPT-2 code, and on H in the vision, speech and code-understanding code
_LANGUAGE = {"K": 3, "learn": ("wK",), "dropout_after": "attention"}
_PAPER: dict[str, dict[str, Any]] = {
    "bert": _LANGUAGE,
    "albert": _LANGUAGE,
    "roberta": _LANGUAGE,
    "gpt2": _LANGUAGE,
    "vit": {"K": 4, "learn": ("wK",), "dropout_after": "filter"},
    "deit": {"K": 4, "learn": ("wK",), "dropout_after": "filter"},
    "cait": {"K": 4, "learn": ("wK",), "dropout_after": "filter"},
    "swin": {"K": 3, "learn": ("wK",), "dropout_after": "filter"},
    "graphormer": {"K": 2, "learn": ("wK",), "dropout_after": "attention"},
    "speech": {"K": 2, "learn": ("wK",), "dropout_after": "filter"},
    "t5": {"K": 3, "learn": ("wK",), "dropout_after": "filter"},
    "bart": {"K": 2, "learn": ("wK",), "dropout_after": "filter"},
    "plbart": {"K": 2, "learn": ("wK",), "dropout_after": "filter"},
}

# classes of other libraries that are one of the paper's backbones
_BACKBONES = {
    "VisionTransformer": "deit",
    "Cait": "cait",
    "SwinTransformer": "swin",
    "Graphormer": "graphormer",
    "TransformerASR": "speech",
}


def preset_for(model: nn.Module, preset: str) -> dict[str, Any]:
    """The arguments of plug that ``preset`` sets for this model."""
    if preset != "paper":
        raise ValueError(f"preset must be 'paper' or None, got {preset!r}")
    backbones = backbones_of(model)
    if not backbones:
        raise ValueError(
            f"the paper has no settings for {type(model).__name__}; it has settings for "
            f"{', '.join(sorted(_PAPER))}. Pass K and learn instead"
        )
    settings = [_PAPER[backbone] for backbone in sorted(backbones)]
    if any(setting != settings[0] for setting in settings):
        raise ValueError(
            f"{type(model).__name__} contains {' and '.join(sorted(backbones))}, for which the "
            "paper has different settings; plug its parts one by one"
        )
    return dict(settings[0])


def backbones_of(model: nn.Module) -> set[str]:
    """Which of the paper's backbones a model is, or contains."""
    found = set()
    for module in model.modules():
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        names = [model_type, *(_BACKBONES.get(cls.__name__) for cls in type(module).__mro__)]
        found |= {name for name in names if name in _PAPER}
    return found
