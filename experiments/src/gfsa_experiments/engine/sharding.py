"""Models on several processes: copies that stay the same, or shards by FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from gfsa_experiments.engine.config import TrainConfig


def is_sharded(accelerator: Accelerator) -> bool:
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def share_buffers(model: nn.Module) -> None:
    """Give every process the buffers of the first one; every process calls this.

    In training each updates the statistics of its batch norms by its own share of a batch.
    """
    for buffer in model.buffers():
        if buffer.is_floating_point():
            torch.distributed.broadcast(buffer, src=0)


def refuse_with_sharding(config: TrainConfig) -> None:
    """Raise for settings that keep whole copies of the weights, or replay a step."""
    for name in ("ema", "best", "patience", "graphs"):
        if getattr(config, name):
            raise ValueError(
                f"{name}={getattr(config, name)} needs all weights in one process, but FSDP shards "
                f"them: leave {name} out, or train without FSDP"
            )


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The weights of a sharded model on the host of the first process; every process calls this.

    Other processes get an empty dict.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_model_state_dict(model, options=options))
