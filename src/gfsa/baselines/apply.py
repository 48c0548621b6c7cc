"""Put a comparison method into a model that already exists, in place and reversibly."""

from __future__ import annotations

from typing import Any

from torch import nn

from gfsa.baselines import hooks
from gfsa.baselines.attnscale import AttnScale
from gfsa.baselines.map_methods import BaselineFilter
from gfsa.baselines.neutreno import NeuTRENO
from gfsa.baselines.on_blocks import CHILD, apply_to_blocks
from gfsa.baselines.on_maps import apply_attnscale, apply_neutreno
from gfsa.baselines.registry import method_named
from gfsa.baselines.report import BaselineReport
from gfsa.baselines.token_methods import TokenMethod
from gfsa.plugs.layer_selection import Layers
from gfsa.plugs.plug import check_model, detach, finish, refuse_wrapped, sockets_of


def apply(model: nn.Module, name: str, layers: Layers = "all", **options: Any) -> BaselineReport:
    """Apply a comparison method to the model's layers, in place.

    Args:
        model: a model with attention that gfsa knows; see ``docs/baselines.md`` for what fits.
        name: one of :data:`METHODS`: ``"attnscale"``, ``"contranorm"``, ``"featscale"``,
            ``"layerscale"``, ``"neutreno"``.
        layers: which layers, as in :func:`gfsa.plug`.
        options: of the method; ``METHODS[name].options`` has them with their defaults.

    Returns:
        A report of where the method acts and what was skipped, with the reason.

    Raises:
        ValueError: if nothing fits, a method is applied already, or a name or an option is not
            known. The model is then as it was.
    """
    check_model(model)
    method = method_named(name, options)
    if _is_applied(model):
        raise ValueError(
            f"{type(model).__name__} has a method applied already; gfsa.baselines.remove(model) "
            "first"
        )
    if method.kind is AttnScale:
        report = apply_attnscale(model, layers, options)
    elif method.kind is NeuTRENO:
        report = apply_neutreno(model, layers, options)
    else:
        report = apply_to_blocks(model, name, method.kind, layers, options)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
            # packed sequences would go past the padding mask; padded ones give the same numbers
            module.use_nested_tensor = False
            module.__dict__["_gfsa_nested"] = True
    return report


def remove(model: nn.Module) -> None:
    """Take the applied method out again: outputs and state_dict keys are as before.

    What it has learned is lost. Filters of :func:`gfsa.plug` stay.
    """
    check_model(model)
    if not _is_applied(model):
        raise ValueError(f"{type(model).__name__} has no method to remove")
    sockets = {
        name: socket
        for name, socket in sockets_of(model).items()
        if isinstance(socket.filter, BaselineFilter)
    }
    refuse_wrapped(sockets)
    for socket in sockets.values():
        detach(socket)
    finish(model, {socket.adapter for socket in sockets.values()})
    hooks.remove_hooks(model)
    for module in list(model.modules()):
        if isinstance(module._modules.get(CHILD), nn.ModuleDict):
            delattr(module, CHILD)
        if isinstance(module, nn.TransformerEncoder) and module.__dict__.pop("_gfsa_nested", False):
            module.use_nested_tensor = True


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """What the applied method learns: for an optimiser group with a learning rate of its own."""
    return [parameter for module in _applied(model) for parameter in module.parameters()]


def _applied(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (BaselineFilter, TokenMethod))]


def _is_applied(model: nn.Module) -> bool:
    # gfsa.unplug takes filters alone, and leaves the hooks beside them
    return bool(_applied(model)) or hooks.has_hooks(model)
