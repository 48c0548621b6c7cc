"""The catalogue: one entry for each model type of transformers and each model file of timm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from census.shrink import shrink
from census.special import SPECIAL, WHOLE


@dataclass(frozen=True)
class Entry:
    """A model that the census builds.

    ``build`` returns it with the library's own random weights, or raises if no tiny model can be
    built.
    """

    library: str
    key: str
    build: Callable[[], nn.Module]

    @property
    def name(self) -> str:
        return f"{self.library}:{self.key}"

    def parameters(self) -> int:
        """How many parameters the model has, without allocating them."""
        try:
            with torch.device("meta"):
                return sum(p.numel() for p in self.build().parameters())
        except (RuntimeError, NotImplementedError):
            # a few models read numbers while they are built
            return sum(p.numel() for p in self.build().parameters())


# a class that generates shows more (caches) than the backbone inside it; of the classes over one
# backbone the census takes the first in this order
_FIRST = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_MAPPING",
)


def entries() -> list[Entry]:
    """Every entry, in a fixed order."""
    return [*_transformers_entries(), *_timm_entries()]


def _transformers_entries() -> list[Entry]:
    from transformers import CONFIG_MAPPING

    return [
        Entry("transformers", kind, functools.partial(build_transformers, kind))
        for kind in sorted(CONFIG_MAPPING.keys())
        if _class_name(kind) is not None
    ]


@functools.cache
def _mappings() -> tuple[Any, ...]:
    from transformers.models.auto import modeling_auto

    names = [n for n in vars(modeling_auto) if n.startswith("MODEL_") and n.endswith("_MAPPING")]
    ordered = [*_FIRST, *sorted(set(names) - set(_FIRST))]
    return tuple(getattr(modeling_auto, name) for name in ordered)


def _class_name(model_type: str) -> tuple[Any, str] | None:
    for mapping in _mappings():
        found = mapping._model_mapping.get(model_type)
        if found is not None:
            return mapping, found if isinstance(found, str) else found[0]
    return None


def build_transformers(
    model_type: str, fields: Mapping[str, Any] | None = None, **options: Any
) -> nn.Module:
    """A tiny model of this type, in the class that :data:`_FIRST` prefers.

    Args:
        fields: of the config, in place of what the census would take.
        options: for the class's ``_from_config``.
    """
    from transformers import CONFIG_MAPPING

    found = _class_name(model_type)
    assert found is not None
    mapping, name = found
    kind = mapping._load_attr_from_module(model_type, name)
    special = {**SPECIAL, model_type: {**SPECIAL.get(model_type, {}), **(fields or {})}}
    config = (
        WHOLE[model_type]()
        if model_type in WHOLE
        else shrink(CONFIG_MAPPING[model_type](), special)
    )
    if kind._can_set_experts_implementation():
        # the grouped kernels for experts have no float64
        options["experts_implementation"] = "eager"
    model: nn.Module = kind._from_config(config, **options)
    return model


def _timm_entries() -> list[Entry]:
    from census.timm_models import TIMM

    return [
        Entry("timm", key, functools.partial(build_timm, name, size, options))
        for key, (name, size, options) in sorted(TIMM.items())
    ]


def build_timm(name: str, size: int, options: dict[str, Any]) -> nn.Module:
    """A small timm model; its attribute ``census_image_size`` is the height of its inputs."""
    import timm

    model: Any = timm.create_model(name, pretrained=False, num_classes=5, **options)
    model.census_image_size = size
    return model


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights under which maps are neither flat nor one-hot: q·k of normalised tokens is O(1)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if not parameter.is_floating_point():
                continue
            if parameter.dim() < 2:
                parameter.add_(0.1 * noise.to(parameter.dtype))
            else:
                fan_in = max(parameter.numel() // max(len(parameter), 1), 1)
                parameter.copy_((noise / fan_in**0.5).to(parameter.dtype))
    return model
