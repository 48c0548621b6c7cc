"""Which layer of a model each filter of a published checkpoint belongs to."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from torch import nn

from gfsa.plugs.saving.identity import canonical_name, pattern_of, some_of
from gfsa.plugs.sites import Site


def match_by_name(
    model: nn.Module, layers: Iterable[str], found: Mapping[str, Site]
) -> dict[str, Site]:
    """The site of each layer of the checkpoint: of the same name, or of one that ends alike."""
    canonical = {name: canonical_name(model, name) for name in found}
    matched: dict[str, Site] = {}
    missing = []
    for layer in layers:
        wanted = canonical_name(model, layer)
        same = [name for name in found if canonical[name] == wanted]
        same = same or [name for name in found if _ends_alike(canonical[name], wanted)]
        if len(same) > 1:
            raise ValueError(
                f"the checkpoint has a filter for {layer}, which {some_of(same)} can be; convert "
                "the part of the model that it belongs to"
            )
        if same:
            matched[layer] = found[same[0]]
        else:
            missing.append(layer)
    if missing:
        raise ValueError(
            f"the checkpoint has filters for {some_of(missing)}, which {type(model).__name__} does "
            f"not have; its attention layers are {some_of(found)}. Build the backbone of the "
            "published code, or match layers by their order (by_order=True, weights=False)"
        )
    _refuse_shared(matched)
    return matched


def match_by_order(layers: Collection[str], found: Mapping[str, Site]) -> dict[str, Site]:
    """The sites that take a filter, in the model's order, for the layers in the checkpoint's."""
    accepting = [site for site in found.values() if site.refusal is None]
    if len(accepting) != len(layers):
        raise ValueError(
            f"the checkpoint has filters for {len(layers)} layers ({some_of(layers)}), the model "
            f"has {len(accepting)} ({some_of(site.name for site in accepting)}): they cannot be "
            "matched by order. Build the backbone that was trained"
        )
    return dict(zip(_by_number(layers), accepting, strict=True))


def _refuse_shared(matched: Mapping[str, Site]) -> None:
    """Raise ValueError if two layers of the checkpoint belong to one of the model."""
    layers: dict[str, list[str]] = {}
    for layer, site in matched.items():
        layers.setdefault(site.name, []).append(layer)
    for name, several in layers.items():
        if len(several) > 1:
            raise ValueError(
                f"the checkpoint has {len(several)} filters for {name}: {some_of(several)}; pass "
                "the weights of one model (without averaged copies beside them)"
            )


def _ends_alike(name: str, other: str) -> bool:
    return name.endswith(f".{other}") or other.endswith(f".{name}")


def _by_number(layers: Iterable[str]) -> list[str]:
    """Names of layers, those of one stack by their numbers: a file may sort 10 before 2."""
    stacks: dict[str, list[str]] = {}
    for layer in layers:
        stacks.setdefault(pattern_of(layer), []).append(layer)
    sorted_names = {
        pattern: iter(sorted(names, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]))
        for pattern, names in stacks.items()
    }
    return [next(sorted_names[pattern_of(layer)]) for layer in layers]
