"""Adapter for the models in :mod:`gfsa.models`, whose attention looks for its filter itself."""

from __future__ import annotations

from torch import nn

from gfsa.models.attention import LinformerAttention, SelfAttention
from gfsa.plugs.adapter import Adapter


class OwnAttention(Adapter):
    """Nothing to install: the forward uses the child ``gfsa`` if it is there."""

    how = "gfsa.models"

    def num_heads(self, module: nn.Module) -> int:
        assert isinstance(module, SelfAttention)
        return module.num_heads

    def refusal(self, name: str, module: nn.Module) -> str | None:
        if isinstance(module, LinformerAttention):
            return "Linformer's map is not square (tokens × projected rows): it has no powers"
        return None

    def install(self, module: nn.Module) -> None:
        pass

    def remove(self, module: nn.Module) -> None:
        pass


_ADAPTER = OwnAttention()


def find(module: nn.Module) -> Adapter | None:
    """The adapter, if ``module`` is attention of one of our models."""
    return _ADAPTER if isinstance(module, SelfAttention) else None
