"""Optimiser parameter groups that give the filters a learning rate of their own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.plugs.sites import filters_of

FILTERS = "filters"
"""The ``"name"`` of the filters' group among an optimiser's parameter groups."""

_FILTER_LR = 1e-2


def parameter_groups(
    model: nn.Module,
    lr: float,
    filter_lr: float | None = None,
    weight_decay: float = 0.0,
    *,
    gain_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, in which the filters have a learning rate of their own.

    A filter has a few numbers per head, which hardly change in a short fine-tuning run at the
    model's usual learning rate. Frozen parameters are left out. In a comparison, tune the plain
    model too: trained from scratch, its gains may need a high learning rate as much as filters do.
    With ``gain_lr`` and without ``filter_lr``, a model without filters is accepted.

    Args:
        model: a plugged model.
        lr: for all parameters but the filters'.
        filter_lr: for the filters; default: 0.01, or ``lr`` if that is higher or the filters were
            plugged with an ``lr_multiplier``.
        weight_decay: for weights of two or more dimensions; biases, norms and filters get none.
        gain_lr: for what is not decayed, filters excepted: biases, gains of norms, temperatures;
            default: as ``lr``.

    An optimizer for matrices alone (Muon) takes ``"weights"``, without embeddings, and another one
    the rest. Do not choose parameters by ``p.ndim == 2``: the numbers of a filter have two
    dimensions, ``(heads, learned numbers)``, and are no matrix.

    Returns:
        Up to three groups, named ``"weights"``, ``"biases"`` and ``"filters"``; empty ones are
        left out.

    Raises:
        TypeError: if ``model`` is no ``nn.Module``.
        ValueError: if the model has no filters (unless ``gain_lr`` alone is given), ``filter_lr``
            finds no parameter to train, or a rate is not a finite number of at least zero.

    Examples:
        >>> report = gfsa.plug(model)
        >>> groups = gfsa.parameter_groups(model, lr=2e-5, filter_lr=1e-2, weight_decay=0.01)
        >>> optimizer = torch.optim.AdamW(groups)
        >>> [(group["name"], group["lr"], group["weight_decay"]) for group in groups]
        [('weights', 2e-05, 0.01), ('biases', 2e-05, 0.0), ('filters', 0.01, 0.0)]
    """
    # torch's optimisers check their own defaults, not the numbers of a group
    rates = {"lr": lr, "filter_lr": filter_lr, "weight_decay": weight_decay, "gain_lr": gain_lr}
    for name, value in rates.items():
        if value is not None and not isinstance(value, Tensor):
            _check_number(name, value)
    is_plain = gain_lr is not None and filter_lr is None and not filters_of(model)
    of_filters = [] if is_plain else trained_parameters(model, filter_lr)
    known = {id(p) for p in of_filters}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    weights = [p for p in rest if p.dim() > 1]
    biases = [p for p in rest if p.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"name": "weights", "params": weights, "lr": lr, "weight_decay": weight_decay},
        {"name": "biases", "params": biases, "lr": lr if gain_lr is None else gain_lr}
        | {"weight_decay": 0.0},
        filter_group(of_filters, _default_rate(model, lr) if filter_lr is None else filter_lr),
    ]
    return [group for group in groups if group["params"]]


def _default_rate(model: nn.Module, lr: Any) -> Any:
    """The filters' rate if none is given: at that of a fine-tuned model they would hardly move."""
    multiplied = any(filter.lr_multiplier != 1 for filter in filters_of(model).values())
    if multiplied or lr >= _FILTER_LR:
        return lr
    # captured steps read a rate from a tensor
    return torch.full_like(lr, _FILTER_LR) if isinstance(lr, Tensor) else _FILTER_LR


def filter_group(of_filters: list[nn.Parameter], lr: float) -> dict[str, Any]:
    """The group of the filters: their own rate, no weight decay."""
    return {"name": FILTERS, "params": of_filters, "lr": lr, "weight_decay": 0.0}


def trained_parameters(model: nn.Module, filter_lr: float | None) -> list[nn.Parameter]:
    """The filters' parameters that are not frozen; with a ``filter_lr`` there has to be one."""
    filters = filters_of(model)
    if not filters:
        raise ValueError(f"{type(model).__name__} has no filters; gfsa.plug(model) first")
    # once each: layers may share a filter that somebody has assigned to both
    of_filters = dict.fromkeys(p for f in filters.values() for p in f.parameters())
    trained = [p for p in of_filters if p.requires_grad]
    if filter_lr is not None and not trained:
        raise ValueError(
            f"filter_lr={filter_lr} has no parameters to act on: every filter is frozen (peft "
            "freezes them unless modules_to_save=['gfsa']), has no learned numbers, or was "
            "flattened by FSDP 1 (use_orig_params=True keeps parameters apart)"
        )
    return trained


def check_rate(filter_lr: float) -> float:
    """``filter_lr`` itself, or a ValueError if it cannot be a learning rate."""
    return _check_number("filter_lr", filter_lr)


def _check_number(name: str, value: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        advice = "; try values from 1e-3 to 1e-2 first" if name == "filter_lr" else ""
        raise ValueError(f"{name} must be a finite number, zero or more, got {value!r:.40}{advice}")
    return float(value)
