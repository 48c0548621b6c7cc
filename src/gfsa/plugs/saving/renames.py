"""Saved filters whose layers have other names in the installed version of their library.

A file names layers as the version did that it was saved with. A saved layer that does not fit the
model is taken for the one layer whose name, class and shapes in the other version are those in the
file. If there is no such layer, or there are two, the description stays as it is, and loading
refuses it. Other names are known from two sources:

- an adapter knows what its library renamed (:class:`Renaming`);
- a model of transformers says which prefix its names may have (``base_model_prefix``), and says so
  in some versions only. In the same class of model a layer may
  have its first name more, or less. Other models, and wrappers around any, have no such prefix.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from gfsa.plugs.saving.identity import (
    canonical_name,
    fingerprint,
    fingerprint_of,
    kind_of_layer,
    pattern_of,
    shapes_of,
    some_of,
    stack_of,
    without_wrappers,
)

if TYPE_CHECKING:
    from gfsa.plugs.sites import Site


Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of parameters by their names."""

Pairs = tuple[tuple[str, str], ...]
"""Parts of names in the installed version and in the other one, made of whole components:
``"attention"`` is a part of ``"0.attention.query"``, ``"att"`` is not."""


@dataclass(frozen=True)
class Renaming:
    """An attention layer as the installed version of a library has it, and as another one has it.

    Both versions have a module, the *root*, that contains the layer's parameters: the layer itself
    or a module around it. A table of renamings is written for the older version as the installed
    one; where the newer version is installed, :meth:`reversed` gives the other direction.
    """

    kind: str
    """The layer's class in the installed version."""
    other_kind: str
    inside: str = ""
    """The layer's name from the root on, in the installed version; empty if it is the root."""
    other_inside: str = ""
    paths: Pairs = ()
    """Parts of the root's name, one of which was exchanged; without any the name is the same."""
    parameters: Pairs = ()
    """How names of parameters begin, from the root on."""
    only_here: Mapping[str, str] = field(default_factory=dict)
    """Parameters of the layer that the other version does not have, each with one of the same
    shape that it has."""
    only_there: Mapping[str, str] = field(default_factory=dict)
    """Likewise, parameters that the other version alone has."""

    def reversed(self) -> Renaming:
        """The same renaming, as the other version sees it."""
        return replace(
            self,
            kind=self.other_kind,
            other_kind=self.kind,
            inside=self.other_inside,
            other_inside=self.inside,
            paths=tuple((there, here) for here, there in self.paths),
            parameters=tuple((there, here) for here, there in self.parameters),
            only_here=self.only_there,
            only_there=self.only_here,
        )

    def root_of(self, name: str) -> str | None:
        """The name of the root, or None if a layer of this name has none."""
        if not self.inside:
            return name
        return name.removesuffix(f".{self.inside}") if name.endswith(f".{self.inside}") else None

    def other_names(self, name: str) -> Iterator[str]:
        """The names that the layer ``name`` of the installed version may have in the other one."""
        root = self.root_of(name)
        if root is None:
            return
        roots = [root]
        if self.paths:
            roots = [new for here, there in self.paths for new in _exchanged(root, here, there)]
        for new in roots:
            yield f"{new}.{self.other_inside}" if self.other_inside else new

    def other_shapes(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """The shapes of the layer in the other version, by its own names.

        Args:
            shapes: of all parameters of the root in the installed version, by their names from the
                root on.
        """
        inside = f"{self.other_inside}." if self.other_inside else ""
        renamed = {self._other_parameter(name): shape for name, shape in shapes.items()}
        layer = {
            name.removeprefix(inside): shape
            for name, shape in renamed.items()
            if name.startswith(inside) and name.removeprefix(inside) not in self.only_here
        }
        added = {name: layer[like] for name, like in self.only_there.items() if like in layer}
        return {**layer, **added}

    def _other_parameter(self, name: str) -> str:
        for here, there in self.parameters:
            if name.startswith(f"{here}."):
                return there + name.removeprefix(here)
        return name


def _exchanged(name: str, part: str, other: str) -> Iterator[str]:
    """The name with ``other`` for ``part``, once for each place that has it."""
    components, wanted = name.split("."), part.split(".")
    for start in range(len(components) - len(wanted) + 1):
        end = start + len(wanted)
        if components[start:end] == wanted:
            yield ".".join([*components[:start], *other.split("."), *components[end:]])


@dataclass(frozen=True)
class _OtherForm:
    """A layer of the model, as another version of its library has it."""

    layer: str
    """Its name in the installed version."""
    name: str
    """Its name in the other version."""
    backbone: dict[str, str]
    """Its fingerprint in the other version."""


def in_installed_names(
    model: nn.Module, found: Mapping[str, Site], description: Mapping[str, Any]
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """The description with the names and fingerprints of the installed version.

    Args:
        model: the model that the filters are for.
        found: its sites.
        description: what a file says of its filters, unchecked.

    Returns:
        The description, and for each renamed layer the name that the file has for it.
    """
    entries = description.get("filters") if isinstance(description, Mapping) else None
    if not isinstance(entries, dict):
        return description, {}
    accepting = {
        canonical_name(model, name): site for name, site in found.items() if not site.refusal
    }
    own = {name: fingerprint_of(site.module) for name, site in accepting.items()}
    # saved under the name of no layer, or of one with another fingerprint
    misfits = {
        saved: entry
        for saved, entry in entries.items()
        if isinstance(entry, dict)
        and (saved not in own or entry.get("backbone", own[saved]) != own[saved])
    }
    if not misfits:
        return description, {}
    forms = list(_renamed_forms(model, accepting))
    # wrappers (compiled, distributed, peft) have one class around any model, and the caller's own
    # classes may share a name: there the same class does not say that the model is the same
    is_of_transformers = hasattr(type(model), "base_model_prefix")
    if is_of_transformers and description.get("model") == type(model).__name__:
        forms += _prefixed_forms(accepting)
    chosen = _chosen_layers(misfits, forms)
    names = [chosen.get(saved, saved) for saved in entries]
    if not chosen or len(set(names)) < len(names):
        return description, {}
    translated = {**description, "filters": dict(zip(names, entries.values(), strict=True))}
    for layer in chosen.values():
        entry = translated["filters"][layer]
        if "backbone" in entry:
            translated["filters"][layer] = {**entry, "backbone": own[layer]}
    if isinstance(description.get("layers"), dict):
        translated["layers"] = _renamed_stacks(description["layers"], forms, chosen)
    return translated, {layer: saved for saved, layer in chosen.items()}


def _chosen_layers(
    misfits: Mapping[str, Mapping[str, Any]], forms: list[_OtherForm]
) -> dict[str, str]:
    """Saved names → the one layer that had this name and these shapes in another version."""
    chosen = {}
    for saved, entry in misfits.items():
        layers = {
            form.layer
            for form in forms
            if form.name == saved and form.backbone == entry.get("backbone", form.backbone)
        }
        if len(layers) == 1:
            chosen[saved] = layers.pop()
    return chosen


def _renamed_forms(model: nn.Module, accepting: Mapping[str, Site]) -> Iterator[_OtherForm]:
    """What the adapters know of other names."""
    for layer, site in accepting.items():
        kind = kind_of_layer(site.module)
        for known in site.adapter.renamings(site.module):
            for renaming in (known, known.reversed()):
                root = renaming.root_of(site.name)
                if renaming.kind != kind or root is None:
                    continue
                shapes = renaming.other_shapes(shapes_of(model.get_submodule(root)))
                backbone = fingerprint(renaming.other_kind, shapes)
                for name in renaming.other_names(layer):
                    yield _OtherForm(layer, name, backbone)


def _prefixed_forms(accepting: Mapping[str, Site]) -> Iterator[_OtherForm]:
    """The layers with the prefix that was left out of their name, or without the first name."""
    for layer, site in accepting.items():
        name = without_wrappers(site.name)
        other = name if name != layer else name.partition(".")[2]
        if other:
            yield _OtherForm(layer, other, fingerprint_of(site.module))


def _renamed_stacks(
    layers: Mapping[str, Any], forms: list[_OtherForm], chosen: Mapping[str, str]
) -> dict[str, Any]:
    """How many layers each stack has, by the names of the installed version."""
    patterns = {(pattern_of(saved), pattern_of(layer)) for saved, layer in chosen.items()}
    stacks = {
        stack_of(form.name): stack_of(form.layer)
        for form in forms
        if (pattern_of(form.name), pattern_of(form.layer)) in patterns
    }
    return {stacks.get(stack, stack): depth for stack, depth in layers.items()}


def warn_of_other_names(model: nn.Module, names_in_file: Mapping[str, str], source: str) -> None:
    """Say which layers were found under another name, or with other parameters."""
    taken = [
        f"{layer} (with other parameters)" if saved == layer else f"{saved} is {layer}"
        for layer, saved in names_in_file.items()
    ]
    warnings.warn(
        f"{source} was saved with another version of the library that {type(model).__name__} is "
        f"from, which has {len(taken)} of its layers under other names or with other parameters; "
        f"their filters were loaded: {some_of(taken)}. gfsa.save writes the names of the installed "
        "version",
        stacklevel=5,
    )
