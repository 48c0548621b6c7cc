"""Optimiser parameter groups that give the filters a learning rate of their own."""

from __future__ import annotations

from typing import Any

from torch import nn

from gfsa.plugs.sites import filters_of


def parameter_groups(
    model: nn.Module,
    lr: float,
    filter_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Optimiser groups: the filters with their own learning rate and no weight decay.

    .. code-block:: python

        optimizer = AdamW(gfsa.parameter_groups(model, lr=2e-5, filter_lr=1e-2))

    A filter's few numbers per head have far to go in a short fine-tuning run: at the model's usual
    learning rate they hardly move. Frozen parameters are left out.

    Args:
        model: a plugged model.
        lr: for all parameters but the filters'.
        filter_lr: for the filters; default: as ``lr``.
        weight_decay: for weights of two or more dimensions; biases, norms and filters get none.
    """
    filters = filters_of(model)
    if not filters:
        raise ValueError(f"{type(model).__name__} has no filters; gfsa.plug(model) first")
    of_filters = [p for f in filters.values() for p in f.parameters() if p.requires_grad]
    if filter_lr is not None and not of_filters:
        raise ValueError(
            f"filter_lr={filter_lr} has no parameters to act on: every filter is frozen (peft "
            "freezes them unless modules_to_save=['gfsa']), or has no learned numbers"
        )
    known = {id(p) for p in of_filters}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    groups = [
        {"name": "weights", "params": [p for p in rest if p.dim() > 1], "lr": lr}
        | {"weight_decay": weight_decay},
        {"name": "biases", "params": [p for p in rest if p.dim() <= 1], "lr": lr}
        | {"weight_decay": 0.0},
        {"name": "filters", "params": of_filters, "lr": lr if filter_lr is None else filter_lr}
        | {"weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
