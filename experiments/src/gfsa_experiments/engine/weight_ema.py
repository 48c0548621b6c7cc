"""An average of the weights along the way."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class WeightAverage(nn.Module):
    """The exponential moving average of a model's weights, evaluated in their stead.

    .. math:: \\bar w \\leftarrow d\\,\\bar w + (1-d)\\,w, \\qquad d = \\min(decay, (1+t)/(10+t))

    The ramp lets short runs forget their random start. Buffers are copied. The step is told by the
    caller, so that nothing is asked of the device.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights after ``step`` steps."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        averaged: list[Tensor] = list(self.module.parameters())
        torch._foreach_lerp_(averaged, list(model.parameters()), share)
        for mine, theirs in zip(self.module.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)
