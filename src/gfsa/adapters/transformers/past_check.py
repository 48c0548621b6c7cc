"""Whether the powers in a cache belong to the tokens whose keys and values it holds.

Another model, without filters, may have used the cache in between. Where lengths are numbers of the
host, they show it. The powers of a static layer have no length of their own, and nor have those of
a window in a compiled graph. Such a layer therefore counts on the host how often it was filled
since each of its modules added powers: once, or the powers are of another past.

A caller may also assign other rows of the same number to a layer, or write into them. The layer
therefore remembers its keys and values, which are compared before the next tokens are added.

A CUDA graph that the caller has captured runs no Python when it is replayed: what it adds to a
cache is not counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def remember_rows(layer: Any) -> None:
    """Note the keys and values of a layer to which powers are added, or whose rows have moved.

    Not while a model is compiled: the graph would check all that is read here, for every token.
    """
    layer.gfsa_rows = _Rows(layer)


def refuse_other_rows(layer: Any) -> None:
    """Raise if keys or values of a layer were assigned or written since it was last looked at."""
    rows: _Rows | None = layer.__dict__.get("gfsa_rows")
    if rows is not None and rows.were_changed_in(layer):
        raise ValueError(
            "keys or values in a layer of the cache were assigned or written after a plugged model "
            "used it: the powers of attention beside them are those of the rows before. Reorder, "
            "select, repeat and crop rows by the cache's own methods, or start from a new cache"
        )


class _Rows:
    """The keys and values that a layer of a cache holds, and how often they were written."""

    def __init__(self, layer: Any) -> None:
        self.keys, self.values = layer.keys, layer.values
        self.filled = _filled(layer)
        self.versions = _versions(layer)

    def __getstate__(self) -> dict[str, Any]:
        # copies of tensors count their changes anew
        return {**self.__dict__, "versions": None}

    def were_changed_in(self, layer: Any) -> bool:
        same = self.keys is layer.keys and self.values is layer.values
        if same and (self.versions is None or self.versions == _versions(layer)):
            return False
        # else by a compiled call, or by another model, which the lengths show
        return self.filled == _filled(layer)


def _filled(layer: Any) -> int:
    """A number that changes when tokens are added to a layer; on the host, without waiting."""
    filled = layer.__dict__.get("cumulative_length")
    if filled is None:
        return layer.keys.shape[-2]
    try:
        return filled if type(filled) is int else filled._version
    except RuntimeError:
        return 0


def _versions(layer: Any) -> tuple[int, int] | None:
    """How often keys and values were written; tensors of inference mode do not count it."""
    try:
        return layer.keys._version, layer.values._version
    except RuntimeError:
        return None


def watch(layer: Any, owner: int) -> None:
    """Count from now on how often a layer is filled.

    Args:
        layer: of the cache, just filled with the first tokens whose powers are added.
        owner: the index of the module that attends to it.
    """
    update = layer.__dict__.get("update")
    if not isinstance(update, _TracedUpdate):
        # a graph that is traced cannot make a module
        is_traced = torch.compiler.is_compiling()
        kind = _TracedUpdate if is_traced else _CountedUpdate
        update = layer.update = kind(layer)
    name = _fillings_for(owner)
    update.counted = (*update.counted, name)
    setattr(layer, name, 1)


def forget_fillings(layer: Any) -> None:
    """After a reset there is no past to which powers could fail to belong."""
    update = layer.__dict__.get("update")
    if isinstance(update, _TracedUpdate):
        for name in update.counted:
            setattr(layer, name, 0)


def _fillings_for(owner: int) -> str:
    """The attribute of a layer that counts how often it was filled since a module added powers.

    One number for each module, and not a dict of them: what a compiled call changes is set after
    it, in every layer for every token, and an attribute is set much faster than a dict is.
    """
    return f"gfsa_fillings_{owner}"


def refuse_another_past(layer: Any, owner: int, counting: list[Any], new: int) -> None:
    """Raise unless the cached powers belong to the tokens whose keys and values the layer holds.

    The caller adds the powers of the ``new`` tokens afterwards.

    Args:
        counting: the companions that count their tokens themselves.
    """
    held = layer.get_seq_length()
    if not _is_on_device(held):
        for companion in counting:
            known = companion.get_seq_length()
            if known + new != held:
                raise ValueError(
                    f"the cache holds {int(held) - new} earlier tokens, but the powers of "
                    f"{int(known)}: {_CAUSES}"
                )
    name = _fillings_for(owner)
    fillings = getattr(layer, name, None)
    if fillings is None:
        return
    if fillings != 1:
        raise ValueError(f"the cache holds tokens without their powers: {_CAUSES}")
    setattr(layer, name, 0)


_CAUSES = (
    "an unplugged model has used it in between, or the layer attends more than once per forward. "
    "Start from a new cache, or pass use_cache=False"
)


def _is_on_device(length: Any) -> bool:
    """Whether a length cannot be read, or only by waiting for the GPU."""
    if not isinstance(length, Tensor):
        return False
    return torch.compiler.is_compiling() or length.device.type != "cpu"


class _TracedUpdate:
    """``update`` of one cache layer, which counts its calls for each module; up to two."""

    counted: tuple[str, ...] = ()

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        for name in self.counted:
            # a number that grows would be compiled again and again
            setattr(layer, name, min(getattr(layer, name) + 1, 2))
        return type(layer).update(layer, *args, **kwargs)


class _CountedUpdate(_TracedUpdate, nn.Module):
    """:class:`_TracedUpdate` as a module, as :class:`~.companions.StaticPowers` is one."""

    def __init__(self, layer: Any) -> None:
        nn.Module.__init__(self)
        _TracedUpdate.__init__(self, layer)
