"""Models and parameters that are distributed over processes.

DistributedDataParallel and fully_shard register the parameters that a model has when they wrap it:
gradients of later ones would not be synchronised, so new parameters are refused afterwards.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

# by name, because most of these classes are not imported with torch, and other libraries have
# classes of their own with these names; with what a message calls them
_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "DeepSpeedEngine": "DeepSpeedEngine",
    # the functions fully_shard and replicate give a module a subclass of these
    "FSDPModule": "fully_shard",
    "torch.distributed._composable.replicate.DDP": "replicate",
}


def refuse_distributed(model: nn.Module, changed: Iterable[nn.Module]) -> None:
    """Raise if new parameters in the ``changed`` modules of ``model`` would not be synchronised."""
    reason = next(_reasons(model, changed), None)
    if reason is not None:
        raise ValueError(
            f"{reason}, so the gradients of parameters that are added now would not be "
            "synchronised and the processes would drift apart. Plug first, then wrap: take the "
            "original model, gfsa.plug, gfsa.load or gfsa.prune it, and wrap it afterwards "
            "(filters without parameters, such as gfsa.Twicing, can be plugged at any time)"
        )


def _wrapper_kind(kind: type) -> str | None:
    """Which wrapper a class is, or None."""
    names = ((base.__name__, f"{base.__module__}.{base.__name__}") for base in kind.__mro__)
    return next((_WRAPPERS[name] for both in names for name in both if name in _WRAPPERS), None)


def _reasons(model: nn.Module, changed: Iterable[nn.Module]) -> Iterator[str]:
    for name, module in model.named_modules():
        wrapper = _wrapper_kind(type(module))
        if wrapper is not None:
            where = f"{name} of {type(model).__name__}" if name else "the model"
            yield f"{where} is wrapped by {wrapper} already"
    for module in changed:
        if any(hasattr(parameter, "full_tensor") for parameter in module.parameters()):
            yield (
                f"the parameters of a {type(module).__name__} are distributed over processes "
                "already (DTensors of fully_shard or parallelize_module)"
            )
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    # a wrapper around the model, which has no reference to it; unused ones are collected first
    gc.collect()
    # by type(), because objects of other libraries may raise when their class is asked for
    for found in [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]:
        wrapper = _wrapper_kind(type(found))
        if wrapper is not None and any(module is model for module in found.modules()):
            yield f"{type(model).__name__} is part of a model that is wrapped by {wrapper} already"


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether a process has a part of the parameter, or at times nothing of it."""
    return hasattr(parameter, "full_tensor") or _is_of_zero(parameter)


@contextlib.contextmanager
def gathered(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, parameters of ZeRO-3 are whole, to be read; every process has to enter.

    A DTensor is gathered by its own ``full_tensor()``.
    """
    of_zero = [parameter for parameter in parameters if _is_of_zero(parameter)]
    if not of_zero:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(of_zero):
        yield


def _is_of_zero(parameter: Any) -> bool:
    # DeepSpeed gives every parameter that it partitions a number
    return hasattr(parameter, "ds_id")
