"""Functions on nested batches: tensors inside dicts, lists, tuples and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """``batch`` with ``function`` applied to every tensor; other values stay."""
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


def leaves_of(batch: Any) -> Iterator[Any]:
    """The tensors and other values of a batch, in order."""
    if isinstance(batch, dict):
        parts: Any = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    else:
        yield batch
        return
    for part in parts:
        yield from leaves_of(part)


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order."""
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch on ``device``, by its own ``.to`` if it has one (as graph batches do)."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def signature_of(batch: Any) -> tuple[Any, ...]:
    """The key of a batch among captured graphs.

    The shapes and dtypes of its tensors, and the ``repr`` of every other value.
    """
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves_of(batch)
    )
