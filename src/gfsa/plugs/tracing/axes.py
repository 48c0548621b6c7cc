"""Telling the axes of a tensor apart by how it was made, where their sizes do not tell.

A projection leaves tokens, heads and features of a sample in this order in memory. Whatever views
are taken of it, strides still say which axis is which; only a copy forgets, so copies are noted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_RESHAPES = (Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten)
_COPIES = (Tensor.contiguous, Tensor.clone, torch.clone)


class Provenance:
    """The reshapes and copies of one forward."""

    def __init__(self) -> None:
        self.reshapes: list[tuple[torch.Size, torch.Size, tuple[int, ...]]] = []
        self.copies: list[tuple[Tensor, tuple[int, ...]]] = []

    def note(self, func: Any, source: Any, made: Any) -> None:
        """Remember what a function made of a tensor, if its strides may tell less than before."""
        if func in _RESHAPES:
            strides = self.strides(source)
            self.reshapes.append((source.shape, made.shape, strides))
            if source.shape[-2:] == made.shape[-2:]:
                # only leading axes were merged: the last two are what they were
                self.copies.append((made, (*made.stride()[:-2], *strides[-2:])))
        elif func in _COPIES:
            self.copies.append((made, self.strides(source)))

    def strides(self, x: Tensor) -> tuple[int, ...]:
        """The strides of ``x`` before it was copied."""
        return next((before for copy, before in self.copies if copy is x), x.stride())

    def samples_first(self, merged: int, heads: int) -> bool | None:
        """Whether an axis of B·H entries counts samples before heads; None if it cannot be told."""
        batch = merged // heads
        merges = [
            (old[i:], strides[i:])
            for old, new, strides in self.reshapes
            for i in range(min(len(old), len(new)))
            if old[:i] == new[:i] and new[i] == merged != old[i]
        ]
        if batch != heads:
            told = {sizes[0] == batch for sizes, _ in merges if sizes[0] in (batch, heads)}
        else:
            # as many samples as heads: in memory, heads lie inside a sample
            told = {
                strides[0] > strides[1]
                for sizes, strides in merges
                if sizes[:2] == (batch, heads) and not _without_gaps(sizes, strides)
            }
        return told.pop() if len(told) == 1 else None

    def features_last(self, values: Tensor) -> bool | None:
        """Whether values are ``(tokens, features)`` in their last axes; None if not told."""
        strides = self.strides(values)[-2:]
        return None if _without_gaps(values.shape[-2:], strides) else strides[0] > strides[1]


def _without_gaps(sizes: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether the tensor may be a copy that was never noted, whose strides say nothing."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
