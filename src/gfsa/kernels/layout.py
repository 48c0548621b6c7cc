"""How tensors lie in memory: what the GPU's copy engine (TMA) takes, and where results go."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

Strides = tuple[int, ...]


def copyable_by_tile(x: Tensor) -> Tensor:
    """``x``, or a copy whose layout the copy engine takes: dense rows, aligned to 16 bytes."""
    strides = x.stride()
    wanted = _strides_by_tile(x.shape, strides, x.element_size())
    if wanted is None or x.data_ptr() % 16:
        # heads or tokens first as in x: results are laid out as the copy is, and the compiler
        # expects them to be laid out as x is
        return empty_like(x).copy_(x)
    return x if wanted == strides else x.as_strided(x.shape, wanted)


@functools.lru_cache(maxsize=1024)
def _strides_by_tile(shape: Sequence[int], strides: Strides, size: int) -> Strides | None:
    """The strides under which the copy engine takes a tensor without a copy, None if none do."""
    step = 16 // size
    # the stride of a dimension of size 1 has no effect
    effective = [s if n > 1 else shape[3] for s, n in zip(strides[:3], shape, strict=False)]
    for candidate in (strides[:3], effective):
        if strides[3] == 1 and all(s > 0 and s % step == 0 for s in candidate):
            return *candidate, 1
    return None


def empty_like(x: Tensor) -> Tensor:
    """An uninitialised result that is laid out as ``x`` is, heads or tokens first."""
    return torch.empty_strided(x.shape, result_strides(x), dtype=x.dtype, device=x.device)


def result_strides(x: Tensor) -> tuple[int, int, int, int]:
    """The strides of :func:`empty_like`."""
    # sizes that the compiler does not know cannot be cache keys
    strides_of = _dense_strides if type(x) is Tensor else _dense_strides.__wrapped__
    return strides_of(x.shape, x.stride(1) < x.stride(2))


@functools.lru_cache(maxsize=1024)
def _dense_strides(shape: Sequence[int], tokens_first: bool) -> tuple[int, int, int, int]:
    _, heads, length, head_dim = shape
    if tokens_first:
        return heads * length * head_dim, head_dim, heads * head_dim, 1
    return heads * length * head_dim, length * head_dim, head_dim, 1


def sum_groups(x: Tensor, like: Tensor) -> Tensor:
    """Add up the heads of ``x`` that share one head of ``like``."""
    group = x.shape[1] // like.shape[1]
    if group == 1:
        return x
    total = empty_like(like)
    return torch.sum(x.unflatten(1, (-1, group)), 2, out=total)
