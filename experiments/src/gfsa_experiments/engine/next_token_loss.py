"""The loss of a decoder without float32 copies of its logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100


class NextTokenLoss:
    """What transformers calls as a model's ``loss_function``: the mean of −log p(next token).

    ``labels[i]`` is what position i predicts: they are shifted already. If ``compiled``, the logits
    are read on a GPU in the precision they come in, once forward and once backward.
    """

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled

    def __call__(self, logits: Tensor, labels: Tensor, **unused: Any) -> Tensor:
        alone = not torch.compiler.is_compiling()
        function = _compiled() if self.compiled and alone and logits.is_cuda else cross_entropy
        return function(logits, labels)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Over every label that is not ignored."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED)


@functools.cache
def _compiled() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(cross_entropy, dynamic=False)
