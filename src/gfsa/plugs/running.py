"""Run a model on one batch of inputs, and for that time in evaluation mode."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


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
    return copy.deepcopy(value) if hasattr(value, "get_seq_length") else value


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
