"""Parameters of which each process has a part: DTensors, and those of DeepSpeed's ZeRO-3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether a process has a part of the parameter, or at times nothing of it."""
    return hasattr(parameter, "full_tensor") or _is_of_zero(parameter)


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of the whole parameter; ZeRO-3 leaves an empty tensor between forwards."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


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
