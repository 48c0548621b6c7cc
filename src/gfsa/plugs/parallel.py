"""Refuse to add parameters to a model that is already distributed over processes.

DistributedDataParallel and fully_shard register the parameters that a model has when they wrap it.
The gradient of a parameter that is added later is not synchronised, and the filters of the
processes drift apart without an error.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn

# by name along the class hierarchy, because most of these classes are not imported with torch
_WRAPPERS = frozenset(
    (
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        # fully_shard and replicate give a module a subclass of it
        "FSDPModule",
        "DeepSpeedEngine",
    )
)


def refuse_distributed(model: nn.Module, changed: Iterable[nn.Module]) -> None:
    """Raise if new parameters in the ``changed`` modules of ``model`` would not be synchronised."""
    reason = _wrapper_inside(model) or _sharded(changed) or _wrapper_around(model)
    if reason is not None:
        raise ValueError(
            f"{reason}, so the gradients of parameters that are added now would not be "
            "synchronised and the processes would drift apart. Plug first, then wrap: take the "
            "original model, gfsa.plug or gfsa.load it, and wrap it afterwards (filters without "
            "parameters, such as gfsa.Twicing, can be plugged at any time)"
        )


def _wrapper_inside(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS:
                where = f"{name} of {type(model).__name__}" if name else "the model"
                wrapper = "fully_shard" if kind.__name__ == "FSDPModule" else kind.__name__
                return f"{where} is wrapped by {wrapper} already"
    return None


def _sharded(changed: Iterable[nn.Module]) -> str | None:
    for module in changed:
        if any(hasattr(parameter, "full_tensor") for parameter in module.parameters()):
            return (
                f"the parameters of a {type(module).__name__} are distributed over processes "
                "already (DTensors of fully_shard or parallelize_module)"
            )
    return None


def _wrapper_around(model: nn.Module) -> str | None:
    """A wrapper that contains ``model``, which itself has no reference to it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if _wrapper_of(model) is None:
        return None
    # a wrapper that is no longer in use may still wait for the garbage collector
    gc.collect()
    wrapper = _wrapper_of(model)
    return wrapper and f"{type(model).__name__} is inside of a {wrapper} already"


def _wrapper_of(model: nn.Module) -> str | None:
    # by type(), because objects of other libraries may raise when their class is asked for
    for candidate in gc.get_objects():
        kinds = {kind.__name__ for kind in type(candidate).__mro__}
        found = kinds & {"DistributedDataParallel", "DeepSpeedEngine"}
        if found and any(module is model for module in candidate.modules()):
            return found.pop()
    return None
