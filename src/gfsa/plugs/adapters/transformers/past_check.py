"""Whether the powers in a cache belong to the tokens whose keys and values it holds.

Another model, without filters, may have used the cache in between. Where lengths are numbers of the
host, they show it. The length of a static layer is on the device: a compiled graph has no number
to read, and reading it from a GPU would synchronise. Such a layer therefore counts on the host how
often it was filled since each of its modules added powers: once, or the powers are of another past.

A CUDA graph that the caller has captured runs no Python when it is replayed: what it adds to a
cache is not counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def watch(layer: Any, owner: int) -> None:
    """Count from now on how often a layer is filled.

    Args:
        layer: of the cache, just filled with the first tokens whose powers are added.
        owner: the index of the module that attends to it.
    """
    if not hasattr(layer, "gfsa_fillings"):
        layer.gfsa_fillings = {}
        layer.update = _CountedUpdate(layer)
    layer.gfsa_fillings[owner] = 1


def forget_fillings(layer: Any) -> None:
    """After a reset there is no past to which powers could fail to belong."""
    fillings = getattr(layer, "gfsa_fillings", {})
    for owner in fillings:
        fillings[owner] = 0


def refuse_another_past(layer: Any, owner: int, companions: list[Any], new: int) -> None:
    """Raise unless the cached powers belong to the tokens whose keys and values the layer holds.

    The caller adds the powers of the ``new`` tokens afterwards.
    """
    held = layer.get_seq_length()
    if not _is_on_device(held):
        for companion in companions:
            known = companion.get_seq_length()
            if known + new != held:
                raise ValueError(
                    f"the cache holds {int(held) - new} earlier tokens, but the powers of "
                    f"{int(known)}: {_CAUSES}"
                )
    fillings = getattr(layer, "gfsa_fillings", None)
    if fillings is None:
        return
    if fillings[owner] != 1:
        raise ValueError(f"the cache holds tokens without their powers: {_CAUSES}")
    fillings[owner] = 0


_CAUSES = (
    "an unplugged model has used it in between, or the layer attends more than once per forward. "
    "Start from a new cache, or pass use_cache=False"
)


def _is_on_device(length: Any) -> bool:
    """Whether a length cannot be read, or only by waiting for the GPU."""
    if not isinstance(length, Tensor):
        return False
    return torch.compiler.is_compiling() or length.device.type != "cpu"


class _CountedUpdate:
    """``update`` of one cache layer, which counts its calls for each module; up to two."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fillings = self.layer.gfsa_fillings
        for owner, times in fillings.items():
            # a number that grows would be compiled again and again
            fillings[owner] = min(times + 1, 2)
        return type(self.layer).update(self.layer, *args, **kwargs)
