"""Lets torchtitan's trainer run on a CPU with gloo and torch 2.13, for tests.

torchtitan trains on accelerators only: its globals name one, its metrics ask for the memory of
one, gloo has no PREMUL_SUM, flex attention has no backward on a CPU, and varlen attention has no
kernel. Its pipeline schedules take microbatches, as those of a newer torch do. What is replaced
here is around the model; attention is replaced by SDPA, which is the same map.

As a script it trains, ``torchrun cpu.py --module tiny --config llama …``, and writes the losses and
gradient norms of its steps to ``$LOSSES-RANK.json``.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torchtitan.components import metrics
from torchtitan.distributed import utils as distributed_utils
from torchtitan.models.common import attention

_MODULES_WITH_A_DEVICE = (
    "torchtitan.tools.utils",
    "torchtitan.tools.profiler",
    "torchtitan.components.metrics",
    "torchtitan.distributed.utils",
    "torchtitan.distributed.parallel_dims",
    "torchtitan.distributed.pipeline_parallel",
)


def use_cpu() -> None:
    """Replace, in this process, what torchtitan has for accelerators only."""
    for name in _MODULES_WITH_A_DEVICE:
        module: Any = importlib.import_module(name)
        if hasattr(module, "device_type"):
            module.device_type = "cpu"
        if hasattr(module, "device_module"):
            module.device_module = torch.cpu
    distributed_utils.set_pg_timeouts = lambda *_, **__: None
    metrics.build_device_memory_monitor = lambda: _NoMemory()
    FSDPModule.set_gradient_divide_factor = _sum_then_divide
    PipelineScheduleSingle.step = _step_of_microbatches
    attention.FlexAttention._compiled_flex_attn = staticmethod(_masked_sdpa)
    attention.varlen_attn = _sdpa_of_documents
    # compiling it takes a CPU a minute
    attention._compiled_create_block_mask = create_block_mask


class _NoMemory:
    device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None: ...


_set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor


def _sum_then_divide(self: FSDPModule, factor: float) -> None:
    self.set_force_sum_reduction_for_comms(True)
    _set_gradient_divide_factor(self, factor)


def _step_of_microbatches(
    self: PipelineScheduleSingle,
    *,
    arg_mbs: list[Any] | None,
    kwarg_mbs: list[Any],
    target_mbs: list[Any] | None,
    losses: list[Any] | None,
    loss_kwargs: dict[str, Any],
    return_outputs: bool,
) -> None:
    self._stage.has_backward = self._has_backward
    self._stage.clear_runtime_states()
    self._step_microbatches(
        arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs
    )


def _masked_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    **_: Any,
) -> tuple[Tensor, None]:
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device=q.device)
    assert enable_gqa == (q.shape[1] != k.shape[1]), "keys are grouped without enable_gqa"
    y = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    return y, None


def _sdpa_of_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    *_: Any,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
    **__: Any,
) -> Tensor:
    """Varlen attention ``(tokens, heads, D)``, one document after the other."""
    assert window_size == (-1, 0), "causal, without a window"
    assert torch.equal(starts, key_starts)
    assert enable_gqa == (q.shape[1] != k.shape[1]), "keys are grouped without enable_gqa"
    sizes = starts.diff().tolist()
    documents = zip(*(x.transpose(0, 1).split(sizes, dim=1) for x in (q, k, v)), strict=True)
    attended = [
        F.scaled_dot_product_attention(
            *document, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        for document in documents
    ]
    return torch.cat(attended, dim=1).transpose(0, 1)


def main() -> None:
    use_cpu()
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger

    init_logger()
    trainer: Any = ConfigManager().parse_args().build()
    steps: list[dict[str, float]] = []
    log = trainer.metrics_processor.log

    def record(step: int, loss: float, largest: float, norm: float, **extra: Any) -> None:
        steps.append({"step": step, "loss": loss, "norm": norm})
        log(step, loss, largest, norm, **extra)

    trainer.metrics_processor.log = record
    groups = [
        {"lr": group["lr"], "weight_decay": group["weight_decay"], "names": group["param_names"]}
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
    ]
    trainer.train()
    with open(f"{os.environ['LOSSES']}-{os.environ['RANK']}.json", "w", encoding="utf-8") as file:
        json.dump({"steps": steps, "groups": groups}, file)
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
