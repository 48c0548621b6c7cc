"""The published settings, backbone by backbone."""

from __future__ import annotations

from typing import Any

from torch import nn

# The published code learns wK alone, from zero. K is an option there for the language models;
# the value here is the one its scripts start from. Dropout acts on A before it is squared in the
# BERT and GPT-2 code, on the finished filter in the vision, speech and code-understanding code.
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
    """The arguments of plug that ``preset`` stands for on this model."""
    if preset != "paper":
        raise ValueError(f"the only preset is 'paper', got {preset!r}")
    backbone = _backbone_of(model)
    if backbone is None:
        raise ValueError(
            f"the paper has no settings for {type(model).__name__}; it has some for "
            f"{', '.join(sorted(_PAPER))}. Give K and learn yourself"
        )
    return dict(_PAPER[backbone])


def _backbone_of(model: nn.Module) -> str | None:
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if kind in _PAPER:
            return str(kind)
        for cls in type(module).__mro__:
            if cls.__name__ in _BACKBONES:
                return _BACKBONES[cls.__name__]
    return None
