"""A run of torchtitan on the CPU: ``torchrun train.py --module tiny --config llama …``.

Writes the losses and gradient norms of its steps to ``$LOSSES-RANK.json``.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from cpu import use_cpu

use_cpu()

from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402


def main() -> None:
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
