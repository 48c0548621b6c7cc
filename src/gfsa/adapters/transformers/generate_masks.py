"""Described masks where ``generate`` makes them: for a static cache, before the model's forward.

``generate`` asks a model's ``create_masks_for_generate`` for them if it has one. A model with
plugged layers gets one that describes the mask of the prompt, of all of its tokens and the free
rows of the cache; those of decoded tokens are one row, and transformers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_utils import PreTrainedModel

from gfsa.adapters.transformers.mask_view import MaskConfigView

_NAME = "create_masks_for_generate"


class _DescribeForGenerate:
    """In place of transformers' function, for one model."""

    def __call__(self, config: Any, **arguments: Any) -> Any:
        return create_masks_for_generate(config=_OneConfig(config, True), **arguments)


class _OneConfig(MaskConfigView):
    """The view of a config without parts: the model's and the text's are the same."""

    def get_text_config(self, *args: Any, **kwargs: Any) -> _OneConfig:
        return self


def describe_for_generate(model: nn.Module, makers: Sequence[PreTrainedModel]) -> None:
    """Have ``generate`` describe masks for ``makers``, and for no other models in ``model``.

    Args:
        makers: the models that take a described mask, by the hooks that they have.
    """
    for module in model.modules():
        if isinstance(module.__dict__.get(_NAME), _DescribeForGenerate):
            del module.__dict__[_NAME]
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _makes_masks_before(module, makers):
            module.__dict__[_NAME] = _DescribeForGenerate()


def _makes_masks_before(module: PreTrainedModel, makers: Sequence[PreTrainedModel]) -> bool:
    """Whether a model's ``generate`` makes the masks of one of ``makers``, in the usual way."""
    if not hasattr(module, "prepare_inputs_for_generation") or hasattr(module, _NAME):
        return False
    config = module.config
    if config.is_encoder_decoder or config.get_text_config() is not config:
        return False
    inside = set(module.modules())
    return any(maker in inside and maker.config is config for maker in makers)
