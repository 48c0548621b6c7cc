"""Overrides for torchtitan: filters, their own rate, and checkpoints that keep them.

.. code-block:: bash

    torchrun … -m torchtitan.train --module llama3 --config llama3_8b --override.imports \\
        'gfsa.titan.filters={"K": 3}' 'gfsa.titan.optimizer={"lr": 0.01}' gfsa.titan.checkpoint

or, in a configuration function of one's own, all three by :func:`plug`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import derive, override
from torchtitan.models.common.attention import GQAttention
from torchtitan.trainer import Trainer

from gfsa.engines.torchtitan import FilterCheckpointManager, FilterConfig, FilteredAttention
from gfsa.plugs.adapter import CHILD
from gfsa.plugs.sites import select_layers

_PATTERN = rf"\.{CHILD}\."


@override(target=GQAttention.Config, exact=True, description="graph-filter self-attention")
def filters(
    attention: GQAttention.Config, filter: str = "GFSA", **arguments: Any
) -> FilteredAttention.Config:
    """Attention with a filter on its map.

    Args:
        attention: the layer's configuration.
        filter: the name of a filter of gfsa: ``GFSA``, ``Polynomial``, ``Twicing`` …
        arguments: for the filter, such as ``K``, ``learn`` and ``power`` of :class:`gfsa.GFSA`.
    """
    of_filter = FilterConfig(n_heads=attention.n_heads, kind=filter, arguments=arguments)
    return derive(attention, FilteredAttention.Config, gfsa=of_filter)


@override(target=OptimizersContainer.Config, exact=True, description="a rate for graph filters")
def optimizer(
    optimizers: OptimizersContainer.Config, lr: float, weight_decay: float = 0.0
) -> OptimizersContainer.Config:
    """The filters in a group of their own; otherwise it is as the last group of ``optimizers``.

    ``lr_multiplier`` of a filter would raise the gradient's norm instead, and clipping would then
    slow down every weight.

    Args:
        optimizers: the configuration of the optimisers.
        lr: the filters' learning rate.
        weight_decay: the filters' weight decay.
    """
    if not optimizers.param_groups:
        raise ValueError("the optimiser has no param_groups to take the filters' optimiser from")
    rest = optimizers.param_groups[-1]
    if rest.optimizer_name not in ("Adam", "AdamW"):
        raise ValueError(
            f"the last of the optimiser's param_groups is of {rest.optimizer_name}, the filters' "
            "numbers need Adam or AdamW: give it, or add a ParamGroupConfig with "
            f"pattern={_PATTERN!r} yourself"
        )
    own = {**rest.optimizer_kwargs, "lr": lr, "weight_decay": weight_decay}
    group = ParamGroupConfig(
        pattern=_PATTERN, optimizer_name=rest.optimizer_name, optimizer_kwargs=own
    )
    # the first pattern that matches takes a parameter
    return derive(
        optimizers, OptimizersContainer.Config, param_groups=[group, *optimizers.param_groups]
    )


@override(target=CheckpointManager.Config, exact=True, description="graph filters in exports")
def checkpoint(manager: CheckpointManager.Config) -> FilterCheckpointManager.Config:
    """The checkpoint manager, whose exports to transformers keep the filters."""
    return derive(manager, FilterCheckpointManager.Config)


def plug(
    config: Trainer.Config,
    layers: str | Iterable[int] = "all",
    filter: str = "GFSA",
    lr: float | None = None,
    weight_decay: float = 0.0,
    **arguments: Any,
) -> list[str]:
    """Put filters into the model that a trainer's configuration describes, in place.

    .. code-block:: python

        def llama3_8b_filtered() -> Trainer.Config:
            config = llama3_8b()
            gfsa.titan.plug(config, layers="upper", K=3, lr=1e-2)
            return config

    Args:
        config: the configuration, which changes.
        layers: as in :func:`gfsa.plug`: ``"all"``, ``"even"``, ``"odd"``, ``"lower"``, ``"upper"``,
            or layer numbers, counted from 1.
        filter, arguments: as in :func:`filters`.
        lr, weight_decay: as in :func:`optimizer`; without ``lr`` the filters are trained as the
            other weights.

    Returns:
        the names of the layers that were plugged.
    """
    if config.model_spec is None:
        raise ValueError("the trainer's configuration has no model_spec")
    found: dict[str, Any] = {
        name: (attention, parent, attribute)
        for name, attention, parent, attribute in config.model_spec.model.traverse(
            GQAttention.Config
        )
        if type(attention) is GQAttention.Config
    }
    if not found:
        raise ValueError(
            f"{config.model_spec.name} has no GQAttention without a filter; Llama 3 and Qwen3 have"
        )
    if type(config.checkpoint) is not CheckpointManager.Config:
        raise ValueError(
            f"expected the checkpoint manager of DCP, got {type(config.checkpoint).__qualname__}: "
            "its exports to transformers would drop the filters"
        )
    chosen = select_layers(found, layers)
    plugged = [name for name in found if name in chosen]
    for name in plugged:
        attention, parent, attribute = found[name]
        setattr(parent, attribute, filters(attention, filter=filter, **arguments))
    if lr is not None:
        config.optimizer = optimizer(config.optimizer, lr=lr, weight_decay=weight_decay)
    config.checkpoint = checkpoint(config.checkpoint)
    return plugged
