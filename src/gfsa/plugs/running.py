"""Run a model on one batch of inputs; keep the random generators as they were."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def call(model: nn.Module, inputs: Any) -> Any:
    """The model on a tensor, a dict of keyword arguments or a tuple of positional arguments."""

    def own(value: Any) -> Any:
        # a forward adds its tokens to a cache, which is the same in every call
        return copied(value) if hasattr(value, "get_seq_length") else value

    if isinstance(inputs, Mapping):
        return model(**{name: own(value) for name, value in inputs.items()})
    if isinstance(inputs, tuple):
        return model(*map(own, inputs))
    return model(inputs)


def copied(value: Any) -> Any:
    """A deep copy, with the values of what a forward with gradients has computed."""
    with _Detached():
        return copy.deepcopy(value)


class _Detached(TorchFunctionMode):
    """Copies tensors with a history, which torch refuses to copy, by their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


@contextmanager
def same_random_numbers(tensors: Iterable[Tensor]) -> Iterator[None]:
    """The generators of these tensors' devices, Python and numpy are afterwards as before."""
    import numpy

    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    kinds = {device.type for device in devices} or {"cuda"}
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        with ExitStack() as stack:
            for kind in kinds:
                if kind == "mps":
                    # one device, whose generator takes no number
                    stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
                    continue
                numbers = sorted({d.index or 0 for d in devices if d.type == kind})
                stack.enter_context(torch.random.fork_rng(numbers, device_type=kind))
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)
