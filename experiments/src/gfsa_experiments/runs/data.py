"""The fingerprint of a run's data."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gfsa_experiments.engine.checkpoints import isolated_generators
from gfsa_experiments.engine.task import Task

_PARTS = ("train", "valid", "test")
# examples hashed per split: enough to distinguish data sets, few enough to be read quickly
_EXAMPLES = 32
# nesting depth below which a value counts by its type alone
_DEEPEST = 8


def fingerprint(task: Task) -> str:
    """``45000+5000+10000 3fa2c1d0``: the sizes of train, valid and test, and a hash.

    The hash is over evenly spaced examples, as :meth:`Task.identity` returns them, and over what
    :class:`OwnData` has of the caller's own. The random state of training does not change.
    """
    sizes = {name: len(task.splits[name]) if name in task.splits else 0 for name in _PARTS}
    digest = sha256()
    with isolated_generators(0):
        for name, size in sizes.items():
            for index in _spread(size):
                for piece in _pieces(task.identity(name, index)):
                    digest.update(piece)
    if task.own_data is not None:
        # two versions of a table may differ in a few labels to train on
        digest.update(task.own_data.digest.encode())
    return f"{'+'.join(map(str, sizes.values()))} {digest.hexdigest()[:8]}"


def _spread(count: int) -> Sequence[int]:
    """At most ``_EXAMPLES`` of ``count`` indices, evenly spaced from the first to the last."""
    if count <= _EXAMPLES:
        return range(count)
    return [at * (count - 1) // (_EXAMPLES - 1) for at in range(_EXAMPLES)]


def _pieces(value: Any, depth: int = 0) -> Iterator[bytes]:
    """A value as bytes: its type, its size and its content.

    The same in every process: independent of addresses, of the order of a dict and of the width
    that a number is stored in.
    """
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        yield from _of_array(value, depth)
    elif isinstance(value, (str, bytes)):
        content = value.encode() if isinstance(value, str) else value
        yield f"{type(value).__name__} {len(content)}:".encode() + content
    elif value is None or isinstance(value, (bool, int, float, complex)):
        yield f"{type(value).__name__} {value!r}:".encode()
    elif isinstance(value, PurePath):
        # folders differ between machines
        yield from _pieces(value.name)
    elif hasattr(value, "tobytes") and hasattr(value, "mode"):
        # an image of Pillow
        yield from _pieces([value.mode, *value.size, value.tobytes()], depth)
    elif depth == _DEEPEST or isinstance(value, types.ModuleType) or callable(value):
        yield f"{type(value).__name__}:".encode()
    else:
        yield from _of_container(value, depth + 1)


def _of_array(value: Any, depth: int) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value if value.layout == torch.strided else value.to_dense()
        # numpy lacks bfloat16
        value = value.double() if value.is_floating_point() else value
        value = value.resolve_conj().resolve_neg().numpy()
    array = np.asarray(value)
    kind = "i" if array.dtype.kind in "biumM" else array.dtype.kind
    if kind not in "ifc":
        # text and objects
        yield from _pieces(array.tolist(), depth)
        return
    array = array.astype({"i": "<i8", "f": "<f8", "c": "<c16"}[kind])
    if kind == "f":
        # NaN has many bit patterns
        array = np.where(np.isnan(array), np.nan, array)
    yield f"{kind} {array.shape}:".encode() + array.tobytes()


def _of_container(value: Any, depth: int) -> Iterator[bytes]:
    if isinstance(value, (list, tuple)):
        yield f"list {len(value)}:".encode()
        for part in value:
            yield from _pieces(part, depth)
        return
    named: Any
    if isinstance(value, Mapping):
        named = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "to_dict"):
        # a graph of PyG
        named = dict(value.to_dict())
    else:
        named = getattr(value, "__dict__", {}) | {"": type(value).__name__}
    named = {str(name): part for name, part in named.items()}
    yield f"dict {len(named)}:".encode()
    for name in sorted(named):
        yield from _pieces(name, depth)
        yield from _pieces(named[name], depth)
