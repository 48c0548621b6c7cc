"""Sites: a model's attention modules, each with its adapter and its filter, or why it has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from gfsa.filters import GraphFilter
from gfsa.plugs.adapter import CHILD, Adapter
from gfsa.plugs.checks.proof import Owners
from gfsa.plugs.partitioned import is_partitioned
from gfsa.plugs.registry import Unknown, find_adapter
from gfsa.plugs.report import IN_PLACE, PlugReport, listed_reasons

ADAPTER = "_gfsa_adapter"
"""The key in ``module.__dict__`` under which a plugged module keeps its adapter."""


@dataclass(frozen=True, eq=False)
class Site:
    """An attention module of a model, with its filter, or with the reason why it has none."""

    name: str
    """The module's name in the model."""
    module: nn.Module
    adapter: Adapter
    child: nn.Module | None = None
    """``module.gfsa`` when the site was found: the filter, another library's wrapper around it,
    or None if the module is not plugged."""
    refusal: str | None = None
    """Why no filter can go here, or None if one can."""

    @property
    def is_plugged(self) -> bool:
        return self.child is not None

    @property
    def num_heads(self) -> int:
        """Query heads of the module; only a site without a refusal has them."""
        return self.adapter.num_heads(self.module)

    @property
    def filter(self) -> GraphFilter:
        """The filter of a plugged site."""
        if isinstance(self.child, GraphFilter):
            return self.child
        if self.child is None:
            raise ValueError(f"{self.name} has no filter; gfsa.plug(model) first")
        inside = [m for m in _active_copy_first(self.child) if isinstance(m, GraphFilter)]
        if not inside:
            raise ValueError(
                f"{self.name}.{CHILD} must be a gfsa.GraphFilter, got {type(self.child).__name__}"
            )
        return inside[0]


def sites(model: nn.Module, unknown: Unknown = "refuse") -> dict[str, Site]:
    """Every attention module of the model, by name, in the model's order.

    Args:
        model: any model; nothing in it changes.
        unknown: whether attention that no adapter knows is refused or traced, as in
            :func:`gfsa.plug`.

    Returns:
        Module name → :class:`Site`, those that cannot be plugged among them, with the reason.

    Raises:
        TypeError: if ``model`` is no ``nn.Module``.
    """
    check_model(model)
    modules = dict(model.named_modules())
    found = {}
    for name, module in modules.items():
        if isinstance(module, GraphFilter):
            # a filter has heads and may be named after attention, but is no site
            continue
        adapter = module.__dict__.get(ADAPTER) or find_adapter(module, unknown)
        if adapter is None:
            continue
        child = getattr(module, CHILD, None)
        refusal = None
        if child is None:
            refusal = adapter.refusal(name, module)
            refusal = refusal or adapter.refusal_inside(_owners(name, modules))
        found[name] = Site(name, module, adapter, child, refusal)
    return found


def plugged_sites(model: nn.Module) -> dict[str, Site]:
    """The sites of the model that have a filter, by name, in the model's order."""
    check_model(model)
    return {
        name: Site(name, module, module.__dict__[ADAPTER], getattr(module, CHILD))
        for name, module in model.named_modules()
        if ADAPTER in module.__dict__
    }


def filters_of(model: nn.Module) -> dict[str, GraphFilter]:
    """The model's filters by the name of their attention module, in the model's order.

    Args:
        model: any model.

    Returns:
        Module name → filter; empty if the model is not plugged.

    Raises:
        TypeError: if ``model`` is no ``nn.Module``.
    """
    return {name: site.filter for name, site in plugged_sites(model).items()}


def accepting_sites(model: nn.Module, found: Mapping[str, Site]) -> dict[str, Site]:
    """The sites without a refusal; raises a ValueError with all refusals if there are none."""
    accepting = {name: site for name, site in found.items() if site.refusal is None}
    if not accepting:
        reasons = listed_reasons({name: str(site.refusal) for name, site in found.items()})
        raise ValueError(
            f"found no self-attention in {type(model).__name__} that a filter can be plugged into"
            + (f"; the attention that was found is refused:{reasons}" if reasons else "")
            + "\ngfsa.register_adapter teaches gfsa an attention class of your own"
        )
    return accepting


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = f". {IN_PLACE}" if isinstance(model, PlugReport) else ""
        raise TypeError(f"expected a model (an nn.Module), got {type(model).__name__}{hint}")


def is_sharded(site: Site) -> bool:
    """Whether the filter's parameters are distributed over processes."""
    return any(is_partitioned(parameter) for parameter in site.filter.parameters())


def refuse_wrapped(found: Mapping[str, Site]) -> None:
    """Raise if another library wraps a filter: it could be neither removed nor replaced."""
    for name, site in found.items():
        if site.child is not site.filter:
            raise ValueError(
                f"the filter of {name} is wrapped in {type(site.child).__name__}; "
                "unwrap the model first (for peft: model.merge_and_unload())"
            )


def refuse_sharded(found: Mapping[str, Site], action: str) -> None:
    """Raise if a filter is distributed over processes, where ``action`` needs all of it."""
    for name, site in found.items():
        if is_sharded(site):
            raise ValueError(
                f"the filter of {name} is sharded over processes; {action} before fully_shard, "
                "parallelize_module or deepspeed.initialize"
            )


def _owners(name: str, modules: dict[str, nn.Module]) -> Owners:
    owners = []
    while name:
        name, _, attribute = name.rpartition(".")
        owners.append((modules[name], attribute))
    return owners


def _active_copy_first(wrapper: nn.Module) -> Iterator[nn.Module]:
    """The modules inside a wrapper; of peft's modules_to_save first the one that runs.

    That is the copy of the active adapter, or the original while adapters are disabled.
    """
    active = getattr(wrapper, "active_adapter", None)
    copies = getattr(wrapper, "modules_to_save", None)
    original = getattr(wrapper, "original_module", None)
    if isinstance(original, nn.Module) and getattr(wrapper, "disable_adapters", False):
        yield original
    elif isinstance(active, str) and isinstance(copies, nn.ModuleDict) and active in copies:
        yield copies[active]
    yield from wrapper.modules()
