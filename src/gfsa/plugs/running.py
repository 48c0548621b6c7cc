"""Run a model on one batch of inputs, and for that time in evaluation mode."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def call(model: nn.Module, inputs: Any) -> Any:
    """The model on a tensor, a dict of keyword arguments or a tuple of positional arguments.

    A cache among them is copied: it is the same in every call, and stays as it is.
    """
    if isinstance(inputs, Mapping):
        return model(**{name: _own_copy(value) for name, value in inputs.items()})
    if isinstance(inputs, tuple):
        return model(*map(_own_copy, inputs))
    return model(inputs)


def _own_copy(value: Any) -> Any:
    # a forward adds its tokens to a key-value cache
    if not hasattr(value, "get_seq_length"):
        return value
    # torch does not copy what a forward with gradients has computed; its values are enough here
    computed = (x for x in _tensors_in(value, set()) if not x.is_leaf)
    return copy.deepcopy(value, {id(x): x.detach().clone() for x in computed})


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in an object: in its attributes, and in lists, tuples and dicts."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    else:
        parts = value if isinstance(value, (list, tuple)) else vars(value).values()
    for part in parts:
        is_object = hasattr(part, "__dict__") and not isinstance(part, type)
        if is_object or isinstance(part, (Mapping, list, tuple)):
            yield from _tensors_in(part, seen)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module has its earlier mode again."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
