"""The adapter of these models' attention, whose forward calls its filter itself."""

from __future__ import annotations

from torch import nn

from gfsa.plugs import Adapter, register_adapter
from gfsa_experiments.models.attention import LinformerAttention, SelfAttention


class OwnAttention(Adapter):
    """Nothing to install: the forward calls the child ``gfsa`` if there is one."""

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


# the package imports this module, so every model of the package finds its adapter registered
register_adapter(SelfAttention, OwnAttention())
