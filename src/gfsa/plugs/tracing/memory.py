"""What the forwards of a traced module have shown, and whether the next has to be followed."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from gfsa.plugs.tracing.layout import Verified
from gfsa.plugs.tracing.path import Path, beginning, inputs_of

# a module whose forward takes a new path each time is followed each time
_PATHS_KEPT = 32
_CALLS_KEPT = 256


class Call(NamedTuple):
    """What is known of a forward before it runs."""

    kind: Hashable
    """The names of its arguments, which of them are None, its flags, and training or not."""
    sizes: Hashable
    """The same with the sizes of its tensors and its numbers."""

    @classmethod
    def of(cls, given: Mapping[str, Any], training: bool) -> Call:
        kind, sizes = (
            (training, *((name, _described(value, exactly)) for name, value in given.items()))
            for exactly in (False, True)
        )
        return cls(kind, sizes)


@dataclasses.dataclass
class TraceMemory:
    """What the forwards of one traced module have shown."""

    known: bool = False
    """Whether tests have verified the module's class: heads are the third axis from the end."""
    paths: dict[Path, Verified] = dataclasses.field(default_factory=dict)
    rows_checked: bool = False
    _kinds: set[Hashable] = dataclasses.field(default_factory=set)
    # by the sizes of a call: whether the path that it took is kept
    _calls: dict[Hashable, bool] = dataclasses.field(default_factory=dict)

    def keep(self, path: Path, verified: Verified) -> None:
        """Keep what a forward on ``path`` has shown, if there is room."""
        if len(self.paths) < _PATHS_KEPT:
            self.paths[path] = verified

    def has_begun(self, given: Mapping[str, Any]) -> bool:
        """Whether a path with these inputs and flags is kept, for graphs that are compiled."""
        first = beginning(inputs_of(given), given)
        return any(path[0] == first for path in self.paths)

    def note(self, call: Call, path: Path) -> None:
        """Remember that a call took a path, which was followed."""
        if max(len(self._kinds), len(self._calls)) >= _CALLS_KEPT:
            self._kinds.clear()
            self._calls.clear()
        self._calls[call.sizes] = path in self.paths
        if path in self.paths:
            self._kinds.add(call.kind)

    def expects_new_path(self, call: Call) -> bool:
        """Whether a call is likely to take a path that is not kept.

        The path is known only when the forward has taken it, and a forward on a path that is not
        kept runs twice. So calls of a new kind are followed from the start, and so are those whose
        sizes show nothing (one sample, or as many as heads) if they were before.
        """
        kept = self._calls.get(call.sizes)
        if kept is not None:
            return not kept
        return call.kind not in self._kinds or len(self.paths) >= _PATHS_KEPT


def _described(value: Any, exactly: bool) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(_described(x, exactly) for x in value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if exactly and isinstance(value, Tensor):
        return tuple(value.shape)
    if exactly and isinstance(value, (int, float)):
        return value
    return type(value).__name__
