"""AdamW with parameter groups, the learning rate of each step, and the average of the weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gfsa_experiments.engine.config import TrainConfig


def build_optimiser(
    model: nn.Module,
    added: Sequence[nn.Parameter],
    config: TrainConfig,
    filter_lr: float | None,
) -> torch.optim.Optimizer:
    """AdamW in up to three groups: decayed, not decayed (biases, norms), added by a method.

    Args:
        added: parameters that a method added to the model; they are not decayed.
        filter_lr: the learning rate of ``added``; None for ``config.lr``.
    """
    of_method = {id(p) for p in added}
    # models of timm name parameters that are not decayed: positions and class tokens
    not_decayed: set[str] = getattr(model, "no_weight_decay", set)()
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in of_method:
            decays = parameter.dim() > 1 and name not in not_decayed
            (decayed if decays else others).append(parameter)
    learned = [p for p in added if p.requires_grad]
    choices = [
        (decayed, config.weight_decay, config.lr),
        (others, 0.0, config.lr if config.gain_lr is None else config.gain_lr),
        (learned, 0.0, config.lr if filter_lr is None else filter_lr),
    ]
    groups = [
        {"params": parameters, "weight_decay": decay, "peak": peak, "lr": peak}
        for parameters, decay, peak in choices
        if parameters
    ]
    if not groups:
        raise ValueError("there is nothing to train: every parameter of the model is frozen")
    device = next(iter(decayed + others + learned)).device
    if config.graphs:
        for group in groups:
            # a CUDA graph reads the learning rate from the device
            group["lr"] = torch.tensor(group["peak"], device=device)
    return torch.optim.AdamW(
        groups,
        betas=(0.9, config.beta2),
        fused=device.type == "cuda",
        capturable=config.graphs,
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
    """Warm-up, then decay to ``min_lr``, as a share of the learning rate.

    ``linear`` and ``cosine`` decay from the warm-up on, ``wsd`` over the last ``decay`` of the
    steps.
    """
    warm = round(config.warmup * total)
    if step < warm:
        return (step + 1) / warm
    if config.schedule == "constant":
        return 1.0
    start = warm
    if config.schedule == "wsd":
        start = max(warm, total - round(config.decay * total))
    progress = max(0.0, (step - start) / max(1, total - start))
    falling = (
        (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    )
    return config.min_lr + (1 - config.min_lr) * falling


class WeightAverage(nn.Module):
    """The exponential moving average of a model's weights, which is evaluated instead of them.

    .. math:: \\bar w \\leftarrow d\\,\\bar w + (1-d)\\,w, \\qquad d = \\min(decay, (1+t)/(10+t))

    Because of the ramp, short runs forget their random start. Buffers are copied. The caller passes
    the step, so the host does not wait for the device. torch's ``AveragedModel`` differs: it has no
    ramp, its first update copies the weights, and its counter is a tensor of the state dict.
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
