"""Which attention function an attention class of transformers calls, and from which registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

REGISTRIES: dict[type, AttentionInterface] = {}
"""Attention class → the registry in which it looks its function up, as far as it is known."""


def functions_of(kind: type[nn.Module]) -> AttentionInterface:
    """The registry in which a class looks its attention function up.

    A model file may have a registry of its own, which overrides entries of the common one.
    """
    registry = REGISTRIES.get(kind)
    if registry is None:
        if torch.compiler.is_compiling():
            return ALL_ATTENTION_FUNCTIONS
        found = inspect.unwrap(kind.forward).__globals__.get("ALL_ATTENTION_FUNCTIONS")
        registry = found if isinstance(found, AttentionInterface) else ALL_ATTENTION_FUNCTIONS
        REGISTRIES[kind] = registry
    return registry


def eager_function_of(module: Any) -> Callable[..., Any] | None:
    """The function that a module calls for eager attention: one that was registered, or its own."""
    registered: Callable[..., Any] | None = functions_of(type(module)).get("eager")
    if registered is not None:
        return registered
    # looked up once, when the module is plugged
    known = module.__dict__
    return known["_gfsa_eager"] if "_gfsa_eager" in known else eager_function(type(module))


def eager_function(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """The eager attention function that a class's forward names, from the forward's globals."""
    forward = inspect.unwrap(kind.forward)
    names = [name for name in forward.__code__.co_names if name.startswith("eager")]
    if len(names) != 1:
        return None
    function: Callable[..., Any] | None = forward.__globals__.get(names[0])
    return function
