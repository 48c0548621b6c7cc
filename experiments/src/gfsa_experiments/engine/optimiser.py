"""AdamW with parameter groups, the learning rate of each step, and the average of the weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.plugs.optim import FILTERS
from gfsa_experiments.engine.config import TrainConfig


def build_optimiser(
    model: nn.Module, added: Sequence[nn.Parameter], config: TrainConfig, filter_lr: float | None
) -> torch.optim.Optimizer:
    """AdamW on the groups of :func:`gfsa.parameter_groups`: weights, gains and biases, filters.

    There are two exceptions. Models of timm name parameters that are not decayed, positions and
    class tokens, which go to the biases; and what baselines added goes where filters are.

    Args:
        added: parameters that a method added to the model, filters included; they are not decayed.
        filter_lr: the learning rate of ``added``; None for ``config.lr``.
    """
    rates = {
        "weights": config.lr,
        "biases": config.lr if config.gain_lr is None else config.gain_lr,
        FILTERS: config.lr if filter_lr is None else filter_lr,
    }
    found: dict[str, list[nn.Parameter]] = {name: [] for name in rates}
    is_added = {id(p) for p in added}
    not_decayed: set[str] = getattr(model, "no_weight_decay", set)()
    for name, p in model.named_parameters():
        if p.requires_grad:
            decayed = "weights" if p.dim() > 1 and name not in not_decayed else "biases"
            found[FILTERS if id(p) in is_added else decayed].append(p)
    groups: list[dict[str, Any]] = [
        {"name": name, "params": own, "lr": rates[name]} for name, own in found.items() if own
    ]
    if not groups:
        raise ValueError("there is nothing to train: every parameter of the model is frozen")
    device = groups[0]["params"][0].device
    for group in groups:
        group["weight_decay"] = config.weight_decay if group["name"] == "weights" else 0.0
        # what a schedule takes its share of; a CUDA graph reads the learning rate from the device
        group["peak"] = group["lr"]
        if config.graphs:
            group["lr"] = torch.tensor(group["peak"], device=device)
    return torch.optim.AdamW(
        groups, betas=(0.9, config.beta2), fused=device.type == "cuda", capturable=config.graphs
    )


def set_learning_rate(
    optimiser: torch.optim.Optimizer, config: TrainConfig, step: int, total: int
) -> float:
    """Set each group's learning rate for ``step`` (counted from 0); returns the first group's."""
    factor = share_of_peak(config, step, total)
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(group["peak"] * factor)
        else:
            group["lr"] = group["peak"] * factor
    return float(optimiser.param_groups[0]["peak"] * factor)


def share_of_peak(config: TrainConfig, step: int, total: int) -> float:
    """Warm-up, then decay to ``min_lr``, as a share of the learning rate."""
    warm = round(config.warmup * total)
    if step < warm:
        return (step + 1) / warm
    if config.schedule == "constant":
        return 1.0
    progress = (step - warm) / max(1, total - warm)
    falling = 1 - progress
    if config.schedule == "cosine":
        falling = (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr + (1 - config.min_lr) * falling


class WeightAverage(nn.Module):
    """The exponential moving average of a model's weights, which is evaluated instead of them.

    .. math:: \\bar w \\leftarrow d\\,\\bar w + (1-d)\\,w, \\qquad d = \\min(decay, (1+t)/(10+t))

    Because of the ramp, which torch's ``AveragedModel`` lacks, short runs forget their random
    start. Buffers are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Add the weights after ``step`` steps."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        averaged: list[Tensor] = list(self.module.parameters())
        torch._foreach_lerp_(averaged, list(model.parameters()), share)
        for average, current in zip(self.module.buffers(), model.buffers(), strict=True):
            average.copy_(current)
