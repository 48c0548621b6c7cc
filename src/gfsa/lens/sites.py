"""The attention sites of a model for the lens, and the blocks around them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from gfsa.filters import GFSA
from gfsa.plugs.attach import install, uninstall
from gfsa.plugs.registry import Unknown
from gfsa.plugs.rollback import all_or_nothing
from gfsa.plugs.sites import Site, accepting_sites, plugged_sites, sites


@contextmanager
def plugged_everywhere(
    model: nn.Module, unknown: Unknown
) -> Iterator[tuple[dict[str, Site], set[str], dict[str, str]]]:
    """Plug every attention module of the model that has no filter, and unplug it at the end.

    The added filters are ordinary attention, bit for bit, so the model computes what it did.

    Yields:
        The plugged sites, the names of those that were plugged here, and the refusals of the rest.
    """
    found = sites(model, unknown)
    accepting = accepting_sites(model, found)
    refusals = {name: site.refusal for name, site in found.items() if site.refusal is not None}
    bare = {name: site for name, site in accepting.items() if not site.is_plugged}
    # also if Ctrl-C comes while the filters are removed
    with all_or_nothing(model):
        install(model, [(site, _ordinary_attention(site.num_heads)) for site in bare.values()])
        plugged = plugged_sites(model)
        yield plugged, set(bare), refusals
        uninstall(model, [plugged[name] for name in bare])


@contextmanager
def no_nested_tensors(model: nn.Module) -> Iterator[None]:
    """Keep torch's encoders from packing padded batches into nested tensors, which have no axes."""
    packing = [
        module
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor
    ]
    try:
        for module in packing:
            module.use_nested_tensor = False
        yield
    finally:
        for module in packing:
            module.use_nested_tensor = True


def _ordinary_attention(heads: int) -> GFSA:
    """A filter that is ordinary attention, in one pass, with no parameters."""
    return GFSA(heads, K=None, learn=())


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every self-attention module of the model that has a filter or can have one, by name."""
    accepting = accepting_sites(model, sites(model))
    return {name: site.module for name, site in accepting.items()}


def blocks_around(model: nn.Module, attention: Iterable[str]) -> dict[str, list[str]]:
    """For each attention module, the names of the blocks that contain no other attention.

    Innermost first, beginning with the attention module itself. A block is an element of a
    ``ModuleList``, ``Sequential`` or ``ModuleDict``: what a model repeats with depth.
    """
    modules = dict(model.named_modules())
    names = list(attention)
    found = {}
    for name in names:
        parts = name.split(".")
        blocks = [name]
        for end in range(len(parts) - 1, 0, -1):
            around = ".".join(parts[:end])
            if sum(other == name or other.startswith(around + ".") for other in names) > 1:
                break
            parent = modules[".".join(parts[: end - 1])]
            repeats = isinstance(parent, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
            if repeats and not isinstance(modules[around], (nn.ModuleList, nn.ModuleDict)):
                blocks.append(around)
        found[name] = blocks
    return found


def containers_around(blocks: dict[str, list[str]]) -> list[str]:
    """The names of the model, ``""``, and of all modules in it that contain blocks.

    Args:
        blocks: what :func:`blocks_around` found.
    """
    containers = [""]
    for name, around in blocks.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            container = ".".join(parts[:end])
            if container in around:
                break
            if container not in containers:
                containers.append(container)
    return containers


def is_inside(name: str, container: str) -> bool:
    """Whether the module ``name`` is inside of the module ``container``; no module is in itself."""
    return name != container and (not container or name.startswith(container + "."))
