"""Methods that take the place of a filter: AttnScale and NeuTRENO."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from gfsa.baselines import hooks
from gfsa.baselines.attnscale import AttnScale
from gfsa.baselines.forward_state import FirstValues, Scope
from gfsa.baselines.mask_readers import Reader
from gfsa.baselines.neutreno import NeuTRENO
from gfsa.baselines.report import BaselineReport
from gfsa.plugs.layer_selection import Layers
from gfsa.plugs.plug import plug


def apply_attnscale(model: nn.Module, layers: Layers, options: dict[str, Any]) -> BaselineReport:
    """AttnScale, with each layer's masks read from what the layer is given."""

    def make(heads: int) -> AttnScale:
        return AttnScale(heads, **options)

    modules = {
        name: model.get_submodule(name)
        for name in plug(model, layers=layers, filter=make, dry_run=True).plugged
    }
    # read from the modules as they are: a plugged one may have another signature
    readers = {name: Reader(module, module, whole=False) for name, module in modules.items()}
    plugged = plug(model, layers=layers, filter=make)
    for name, module in modules.items():
        scope = Scope(name)
        made = module.gfsa
        assert isinstance(made, AttnScale)
        made.scope = scope
        module.register_forward_pre_hook(hooks.OpenScope(scope, readers[name]), with_kwargs=True)
        module.register_forward_hook(hooks.CloseScope(scope))
    where = dict.fromkeys(plugged.plugged, "its attention map")
    return BaselineReport("attnscale", where, plugged.skipped, plugged.parameters)


def apply_neutreno(model: nn.Module, layers: Layers, options: dict[str, Any]) -> BaselineReport:
    """NeuTRENO, the model's first layer telling the others its values."""
    memory = FirstValues()

    def make(heads: int) -> NeuTRENO:
        return NeuTRENO(heads, memory=memory, **options)

    everywhere = plug(model, filter=make, dry_run=True).plugged
    chosen = plug(model, layers=layers, filter=make, dry_run=True).plugged
    _check_one_stack(model, everywhere)
    source = next(iter(everywhere))
    wanted = {source, *chosen}
    plugged = plug(model, layers=lambda name, module: name in wanted, filter=make)
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


def _check_one_stack(model: nn.Module, heads: dict[str, int]) -> None:
    stacks = sorted({re.sub(r"\d+", "#", name) for name in heads})
    kinds = {name: type(model.get_submodule(name)).__name__ for name in heads}
    windows = [name for name, kind in kinds.items() if "window" in kind.lower()]
    reason = None
    if windows:
        reason = f"{windows[0]} attends in windows, which are cut anew in each layer"
    elif len(stacks) > 1:
        reason = f"its layers are of different stacks: {', '.join(stacks)}"
    elif len(set(heads.values())) > 1:
        reason = f"its layers have different numbers of heads: {sorted(set(heads.values()))}"
    if reason is not None:
        raise ValueError(
            "NeuTRENO adds the first layer's values to every layer's, token by token, which has "
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
