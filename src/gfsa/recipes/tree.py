"""Batches: tensors inside dicts, lists, tuples and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """``batch`` with every tensor replaced by ``function`` of it; anything else stays."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(function, value) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch)]
        return dataclasses.replace(
            batch, **{name: map_tensors(function, getattr(batch, name)) for name in names}
        )
    return batch


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, batch)
    return found


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch on ``device``, by its own ``.to`` if it has one (a graph batch, say)."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def shapes_of(batch: Any) -> tuple[Any, ...]:
    """What two batches have in common if one computation serves both."""
    return tuple((tuple(t.shape), t.dtype) for t in tensors_of(batch))
