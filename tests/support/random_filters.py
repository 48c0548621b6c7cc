"""Filters with numbers that none of them starts with, the same ones each time."""

from __future__ import annotations

import torch
from torch import nn

import gfsa


def randomise(model: nn.Module, scale: float = 0.3) -> None:
    """Give every filter in ``model`` that learns a random θ."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, gfsa.GraphFilter) and module.theta is not None:
                theta = torch.randn(module.theta.shape, generator=generator)
                module.theta.copy_(theta * scale)
