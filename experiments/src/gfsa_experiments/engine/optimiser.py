"""AdamW with parameter groups, the learning rate of each step, and the average of the weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gfsa
from gfsa.plugs.optim import FILTERS
from gfsa_experiments.engine.config import TrainConfig


def build_optimiser(
    model: nn.Module,
    added: Sequence[nn.Parameter],
    config: TrainConfig,
    filter_lr: float | None,
) -> torch.optim.Optimizer:
    """AdamW on the groups of :func:`gfsa.parameter_groups`: weights, gains and biases, filters.

    Args:
        added: parameters that a method added to the model; they are not decayed.
        filter_lr: the learning rate of ``added``; None for ``config.lr``.
    """
    rates = {
        "weights": config.lr,
        "biases": config.lr if config.gain_lr is None else config.gain_lr,
        FILTERS: config.lr if filter_lr is None else filter_lr,
    }
    filters = gfsa.filters_of(model).values()
    # a rate without a filter that learns is refused there; what baselines add is no filter
    of_filters = any(p.requires_grad for f in filters for p in f.parameters())
    groups = gfsa.parameter_groups(
        model,
        rates["weights"],
        rates[FILTERS] if of_filters else None,
        config.weight_decay,
        gain_lr=rates["biases"],
    )
    groups = _with_exceptions(groups, model, added, rates)
    if not groups:
        raise ValueError("there is nothing to train: every parameter of the model is frozen")
    device = groups[0]["params"][0].device
    for group in groups:
        # what a schedule takes its share of; a CUDA graph reads the learning rate from the device
        group["peak"] = group["lr"]
        if config.graphs:
            group["lr"] = torch.tensor(group["peak"], device=device)
    return torch.optim.AdamW(
        groups,
        betas=(0.9, config.beta2),
        fused=device.type == "cuda",
        capturable=config.graphs,
    )


def _with_exceptions(
    groups: list[dict[str, Any]],
    model: nn.Module,
    added: Sequence[nn.Parameter],
    rates: dict[str, float],
) -> list[dict[str, Any]]:
    """``groups`` with two exceptions, which a recipe with filters of gfsa alone does not have.

    Models of timm name parameters that are not decayed, positions and class tokens, which go to the
    biases; and what baselines added to the model goes where filters are.
    """
    found = {id(p): group["name"] for group in groups for p in group["params"]}
    not_decayed: set[str] = getattr(model, "no_weight_decay", set)()
    wanted = dict(found)
    for name, parameter in model.named_parameters():
        if name in not_decayed and found.get(id(parameter)) == "weights":
            wanted[id(parameter)] = "biases"
    wanted |= {id(p): FILTERS for p in added if p.requires_grad}
    if wanted == found:
        return groups
    decays = {group["name"]: group["weight_decay"] for group in groups}
    regrouped = [
        {
            "name": name,
            # filters in the order in which they were added, the others in that of the model
            "params": [
                p
                for p in (added if name == FILTERS else model.parameters())
                if wanted.get(id(p)) == name
            ],
            "lr": rate,
            "weight_decay": decays.get(name, 0.0),
        }
        for name, rate in rates.items()
    ]
    return [group for group in regrouped if group["params"]]


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
