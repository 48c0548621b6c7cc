"""Put a comparison method into a model that already exists, in place and reversibly."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gfsa.baselines import blocks as anatomy
from gfsa.baselines import hooks
from gfsa.baselines.attnscale import AttnScale
from gfsa.baselines.base import BaselineFilter
from gfsa.baselines.blocks import Anatomy, Place
from gfsa.baselines.branches import ContraNorm, FeatScale, LayerScale, TokenMethod
from gfsa.baselines.neutreno import NeuTRENO
from gfsa.baselines.readers import Reader
from gfsa.baselines.registry import method_named
from gfsa.baselines.scope import FirstValues, Scope
from gfsa.plugs.core import (
    check_model,
    detach,
    finish,
    plug,
    refuse_wrapped,
    sockets_of,
)
from gfsa.plugs.layers import Layers, select_layers

CHILD = "gfsa_baseline"
"""The name under which a method's modules become a child of their block."""


@dataclass
class BaselineReport:
    """What :func:`apply` did."""

    method: str
    plugged: dict[str, str] = field(default_factory=dict)
    """Module name → where the method acts, in the model's order."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Module name → why it was left alone."""
    parameters: int = 0
    """How many learned numbers were added."""

    def __str__(self) -> str:
        lines = [
            f"{self.method} in {len(self.plugged)} layers, {self.parameters} learned numbers "
            f"({len(self.skipped)} skipped)"
        ]
        lines += [
            f"  {number:>3}  {name}: {where}"
            for number, (name, where) in enumerate(self.plugged.items(), start=1)
        ]
        lines += [f"    -  {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


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
        report = _apply_attnscale(model, layers, options)
    elif method.kind is NeuTRENO:
        report = _apply_neutreno(model, layers, options)
    else:
        report = _apply_to_blocks(model, name, method.kind, layers, options)
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
    return bool(_applied(model))


def _apply_attnscale(model: nn.Module, layers: Layers, options: dict[str, Any]) -> BaselineReport:
    plugged = plug(model, layers=layers, filter=lambda heads: AttnScale(heads, **options))
    try:
        for name in plugged.plugged:
            module = model.get_submodule(name)
            made = module.gfsa
            assert isinstance(made, AttnScale)
            made.scope = Scope(name)
            reader = Reader(module, module, whole=False)
            module.register_forward_pre_hook(hooks.OpenScope(made.scope, reader), with_kwargs=True)
            module.register_forward_hook(hooks.CloseScope(made.scope))
    except ValueError:
        remove(model)
        raise
    where = dict.fromkeys(plugged.plugged, "its attention map")
    return BaselineReport("attnscale", where, plugged.skipped, plugged.parameters)


def _apply_neutreno(model: nn.Module, layers: Layers, options: dict[str, Any]) -> BaselineReport:
    everywhere = plug(model, filter=lambda heads: NeuTRENO(heads, **options), dry_run=True)
    chosen = plug(
        model, layers=layers, filter=lambda heads: NeuTRENO(heads, **options), dry_run=True
    )
    names = list(everywhere.plugged)
    _check_one_stack(model, names, everywhere.plugged)
    memory = FirstValues()
    source = names[0]
    wanted = {source, *chosen.plugged}
    plugged = plug(
        model,
        layers=lambda name, module: name in wanted,
        filter=lambda heads: NeuTRENO(heads, memory=memory, **options),
    )
    first = model.get_submodule(source).gfsa
    assert isinstance(first, NeuTRENO)
    first.is_source = True
    root = model.get_submodule(_root(model, source))
    root.register_forward_pre_hook(hooks.OpenFirstValues(memory))
    root.register_forward_hook(hooks.CloseFirstValues(memory))
    where = {
        name: "the source of v⁰" if name == source else "its attention's output"
        for name in plugged.plugged
    }
    return BaselineReport("neutreno", where, plugged.skipped, plugged.parameters)


def _check_one_stack(model: nn.Module, names: list[str], heads: dict[str, int]) -> None:
    kinds = {re.sub(r"\d+", "#", name) for name in names}
    windows = [
        name for name in names if "window" in type(model.get_submodule(name)).__name__.lower()
    ]
    if windows or len(kinds) > 1 or len(set(heads.values())) > 1:
        reason = (
            f"{windows[0]} attends in windows that are cut anew in each layer"
            if windows
            else f"its layers are of different stacks: {', '.join(sorted(kinds))}"
            if len(kinds) > 1
            else f"its layers have different numbers of heads: {sorted(set(heads.values()))}"
        )
        raise ValueError(
            f"NeuTRENO adds the first layer's values to every layer's, token by token, which has "
            f"no meaning in {type(model).__name__}: {reason}. Apply it to one stack of layers"
        )


def _root(model: nn.Module, name: str) -> str:
    """The module around all layers that is called once a forward: the stack that holds them."""
    path = name.split(".") if name else []
    numbered = next((i for i, part in enumerate(path) if part.isdigit()), len(path) - 1)
    path = path[: max(numbered, 0)]
    containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    while path and isinstance(model.get_submodule(".".join(path)), containers):
        path.pop()
    return ".".join(path)


def _apply_to_blocks(
    model: nn.Module, name: str, kind: Any, layers: Layers, options: dict[str, Any]
) -> BaselineReport:
    report = BaselineReport(name)
    candidates: dict[str, tuple[nn.Module, dict[str, Place]]] = {}
    for path, block in model.named_modules():
        parts = anatomy.anatomy_of(block)
        if parts is None:
            continue
        places = _places(kind, block, parts, options)
        if isinstance(places, str):
            report.skipped[path] = places
        else:
            candidates[path] = (block, places)
    if not candidates:
        reasons = "".join(f"\n  {path}: {why}" for path, why in report.skipped.items())
        raise ValueError(
            f"{name} has no place in {type(model).__name__}"
            + (f":{reasons}" if reasons else f"; it is known in {anatomy.FAMILIES}")
        )
    chosen = select_layers({path: block for path, (block, _) in candidates.items()}, layers)
    planned = []
    for path, (block, places) in candidates.items():
        if path not in chosen:
            report.skipped[path] = "not among the chosen layers"
            continue
        parts = anatomy.anatomy_of(block)
        assert parts is not None
        made = nn.ModuleDict({key: _make(kind, block, parts, options) for key in places})
        planned.append((path, block, parts, places, made))
        report.plugged[path] = ", ".join(str(place) for place in places.values())
        report.parameters += sum(p.numel() for p in made.parameters())
    for path, block, parts, places, made in planned:
        _install(path, block, parts, places, made)
    return report


def _places(
    kind: Any, block: nn.Module, parts: Anatomy, options: dict[str, Any]
) -> dict[str, Place] | str:
    """Where a method acts in a block, or why it cannot."""
    if kind is LayerScale:
        if anatomy.owns_layer_scale(block, parts):
            return "it has a LayerScale of its own"
        return parts.branches
    if kind is FeatScale:
        return {"attention": parts.branches["attention"]}
    if options.get("form") == "vit":
        if not parts.norms:
            return parts.why_no_norm
        return {f"norm{i}": Place(norm, "input") for i, norm in enumerate(parts.norms, start=1)}
    if parts.after_attention is None:
        return parts.why_no_norm
    return {"norm": Place(parts.after_attention, "input")}


def _make(kind: Any, block: nn.Module, parts: Anatomy, options: dict[str, Any]) -> TokenMethod:
    if kind is ContraNorm:
        return ContraNorm(**options)
    held = next(block.parameters())
    dtype = torch.float64 if held.dtype == torch.float64 else torch.float32
    made: TokenMethod = kind(anatomy.width_of(block, parts), **options)
    return made.to(held.device, dtype)


def _install(
    path: str, block: nn.Module, parts: Anatomy, places: dict[str, Place], made: nn.ModuleDict
) -> None:
    made.train(block.training)
    block.add_module(CHILD, made)
    methods: dict[str, Any] = dict(made.items())
    scope = Scope(path or type(block).__name__, len(places))
    reader = None
    teller = block.get_submodule(parts.masks_at)
    if any(method.needs_sight for method in methods.values()):
        reader = Reader(teller, block.get_submodule(parts.attention), whole=True)
    teller.register_forward_pre_hook(hooks.OpenScope(scope, reader), with_kwargs=True)
    swapped = anatomy.sequence_first(block)
    for key, place in places.items():
        module = block.get_submodule(place.module)
        if place.side == "input":
            module.register_forward_pre_hook(hooks.AtInput(scope, methods[key], swapped))
        else:
            module.register_forward_hook(hooks.AtOutput(scope, methods[key], swapped))
    block.register_forward_hook(hooks.CloseScope(scope))
