"""Find tensors of tokens in the arguments and outputs of a model's modules."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gfsa.operators import Operator


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in a block's input or output: nested tuples, lists, dicts."""
    if isinstance(value, Tensor):
        # a nested tensor has no axis of tokens
        has_tokens = value.is_floating_point() and value.dim() >= 2 and not value.is_nested
        return value if has_tokens else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for part in value:
            found = first_tensor(part)
            if found is not None:
                return found
    return None


def whole_map(operator: Operator) -> Operator:
    """The operator inside one that decodes with a cache, or the operator itself.

    The lens applies the map to other tokens, which must not be added to that cache.
    """
    inner = getattr(operator, "rows", None)
    return inner if isinstance(inner, Operator) else operator


class Arguments(NamedTuple):
    """What a module was called with."""

    takes: tuple[str, ...]
    """The parameters of its forward."""
    given: dict[str, Any]
    """By name, in the order of the parameters. What only ``*args`` takes is not here."""
    passes_on: bool
    """Whether its forward has ``*args``: a wrapper, whose arguments have names further inside."""


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Bind the arguments of a call to the names of the forward's parameters."""
    if torch.compiler.is_compiling():
        # the compiler follows hooks of what it compiles, but not inspect
        return Arguments((), kwargs, passes_on=True)
    kinds = inspect.Parameter
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        # compiled code, whose parameters have no names
        return Arguments((), kwargs, passes_on=True)
    named = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    positional = [name for name, p in parameters.items() if p.kind in named]
    given = {**dict(zip(positional, args, strict=False)), **kwargs}
    order = [name for name in parameters if name in given]
    order += [name for name in given if name not in parameters]
    return Arguments(
        takes=tuple(parameters),
        given={name: given[name] for name in order},
        passes_on=any(p.kind is kinds.VAR_POSITIONAL for p in parameters.values()),
    )
