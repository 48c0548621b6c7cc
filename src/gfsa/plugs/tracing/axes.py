"""Identify the axes of a tensor by its strides and reshapes, where sizes are ambiguous.

A projection writes tokens, heads and features of a sample to memory in this order. In every view of
it the strides still show which axis is which; only a copy loses them, so copies are recorded.
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

    def note(self, func: Any, source: Any, result: Any) -> None:
        """Record a call of ``func`` that may have changed the strides of ``source``."""
        if func in _RESHAPES:
            strides = self.strides(source)
            self.reshapes.append((source.shape, result.shape, strides))
            if source.shape[-2:] == result.shape[-2:]:
                # only leading axes were merged: the last two keep their strides
                self.copies.append((result, (*result.stride()[:-2], *strides[-2:])))
        elif func in _COPIES:
            self.copies.append((result, self.strides(source)))

    def strides(self, x: Tensor) -> tuple[int, ...]:
        """The strides of ``x`` before it was copied."""
        return next((before for copy, before in self.copies if copy is x), x.stride())

    def samples_first(self, merged: int, heads: int) -> bool | None:
        """Whether an axis of B·H entries has samples before heads; None if undecidable."""
        batch = merged // heads
        merges = [
            (old[i:], strides[i:])
            for old, new, strides in self.reshapes
            for i in range(min(len(old), len(new)))
            if old[:i] == new[:i] and new[i] == merged != old[i]
        ]
        if batch != heads:
            answers = {sizes[0] == batch for sizes, _ in merges if sizes[0] in (batch, heads)}
        else:
            # as many samples as heads: in memory, the heads of a sample are adjacent
            answers = {
                strides[0] > strides[1]
                for sizes, strides in merges
                if sizes[:2] == (batch, heads) and not _without_gaps(sizes, strides)
            }
        return answers.pop() if len(answers) == 1 else None

    def features_last(self, values: Tensor) -> bool | None:
        """Whether the last axes of values are ``(tokens, features)``; None if undecidable."""
        strides = self.strides(values)[-2:]
        return None if _without_gaps(values.shape[-2:], strides) else strides[0] > strides[1]


def _without_gaps(sizes: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether the tensor is contiguous: it may be an unrecorded copy, with new strides."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
