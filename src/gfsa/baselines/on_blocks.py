"""Methods that act on the tokens inside a block: ContraNorm, FeatScale, LayerScale."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gfsa.baselines import block_anatomy as anatomy
from gfsa.baselines import hooks
from gfsa.baselines.block_anatomy import Anatomy, Place
from gfsa.baselines.forward_state import Scope
from gfsa.baselines.mask_readers import Reader
from gfsa.baselines.report import BaselineReport
from gfsa.baselines.token_methods import ContraNorm, FeatScale, LayerScale, TokenMethod
from gfsa.plugs.adapter import find_adapter
from gfsa.plugs.layer_selection import Layers, select_layers

CHILD = "gfsa_baseline"
"""The name under which a method's modules become a child of their block."""


def apply_to_blocks(
    model: nn.Module, name: str, kind: Any, layers: Layers, options: dict[str, Any]
) -> BaselineReport:
    """A method of tokens, at its places in each of the blocks that are chosen."""
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
    known = tuple(f"{path}." if path else "" for path in (*candidates, *report.skipped))
    for path, module in model.named_modules():
        if find_adapter(module) is not None and known and not path.startswith(known):
            report.skipped[path] = "it is in no block that is known"
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
