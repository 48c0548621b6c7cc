"""Autocast for operators: casts arguments as torch casts those of its own attention."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast, for operators, which choose their precision themselves."""
    if torch.compiler.is_compiling() or (
        _has_autocast(device.type) and torch.is_autocast_enabled(device.type)
    ):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _has_autocast(device: str) -> bool:
    if device in ("cuda", "cpu"):
        return True
    # the compiler cannot trace this query, and every device that it compiles for has autocast
    return torch.compiler.is_compiling() or _autocast_is_available(device)


_autocast_is_available = functools.cache(torch.amp.is_autocast_available)


def autocast(*tensors: Any) -> Any:
    """Cast as autocast casts the arguments of torch's own attention, by the first one's device."""
    device = tensors[0].device.type
    if not _has_autocast(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    for place, x in enumerate(tensors):
        if x is None or x.dtype in (dtype, torch.float64) or not x.dtype.is_floating_point:
            continue
        tensors = (*tensors[:place], x.to(dtype), *tensors[place + 1 :])
    return tensors
