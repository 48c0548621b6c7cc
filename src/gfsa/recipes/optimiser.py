"""AdamW with groups, and the learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from gfsa.recipes.config import TrainConfig


def build_optimiser(
    model: nn.Module, added: list[nn.Parameter], config: TrainConfig, filter_lr: float | None
) -> torch.optim.Optimizer:
    """AdamW; biases, norms and what a method added are not decayed.

    Args:
        model: the model.
        added: its parameters that a method put there.
        config: learning rate and weight decay.
        filter_lr: the learning rate of ``added``.
    """
    theirs = {id(p) for p in added}
    # models of timm name what is not to be decayed: positions and class tokens
    spared: set[str] = getattr(model, "no_weight_decay", set)()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    rest = [p for _, p in named if id(p) not in theirs]
    decayed = [p for name, p in named if p.dim() > 1 and name not in spared]
    decays = {id(p) for p in decayed} - theirs
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in rest if id(p) in decays],
            "weight_decay": config.weight_decay,
            "rate": config.lr,
        },
        {
            "params": [p for p in rest if id(p) not in decays],
            "weight_decay": 0.0,
            "rate": config.lr,
        },
        {
            "params": [p for p in added if p.requires_grad],
            "weight_decay": 0.0,
            "rate": config.lr if filter_lr is None else filter_lr,
        },
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError("there is nothing to train: every parameter of the model is frozen")
    device = groups[0]["params"][0].device
    for group in groups:
        group["peak"] = group.pop("rate")
        # a graph reads its learning rate from the device
        group["lr"] = torch.tensor(group["peak"], device=device) if config.graphs else group["peak"]
    return torch.optim.AdamW(
        groups,
        betas=(0.9, config.beta2),
        fused=device.type == "cuda",
        capturable=config.graphs,
    )


def set_learning_rate(
    optimiser: torch.optim.Optimizer, config: TrainConfig, step: int, total: int
) -> float:
    """Give each group its rate for ``step`` (counted from 0); returns the first group's."""
    factor = share_of_peak(config, step, total)
    for group in optimiser.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(group["peak"] * factor)
        else:
            group["lr"] = group["peak"] * factor
    return float(optimiser.param_groups[0]["peak"] * factor)


def share_of_peak(config: TrainConfig, step: int, total: int) -> float:
    """Warm-up, then decay to ``min_lr``, as a share of the learning rate.

    ``linear`` and ``cosine`` fall from the warm-up on, ``wsd`` over the last ``decay`` of steps.
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
