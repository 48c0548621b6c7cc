"""How a library renamed an attention layer between two of its versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

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
