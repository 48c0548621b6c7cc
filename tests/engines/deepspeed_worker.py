"""A process of ``torchrun -m engines.deepspeed_worker STAGE FOLDER``, or the run without DeepSpeed.

Writes the filters to ``FOLDER/filters`` and what it saw to ``FOLDER/RANK.json``. With a third
argument, ``cost``, it writes what a step with filters takes relative to one without.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist

import gfsa
from engines.shared import tiny_llama
from support.measuring import time_ratio

STEPS, BATCH, LENGTH = 4, 4, 16
RATES = {"lr": 1e-3, "filter_lr": 1e-1}


def tokens(step: int) -> torch.Tensor:
    return torch.randint(64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def plugged() -> tuple[Any, torch.optim.Optimizer]:
    model = tiny_llama()
    gfsa.plug(model)
    groups = gfsa.parameter_groups(model, **RATES, weight_decay=0.1)
    # a large eps: Adam's first steps would else be the signs of gradients, even of rounding errors
    return model, torch.optim.AdamW(groups, eps=1e-3)


def alone(folder: Path) -> list[float]:
    """The same steps in one process without DeepSpeed; returns the losses."""
    model, optimizer = plugged()
    losses = []
    for step in range(STEPS):
        ids = tokens(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    gfsa.save(model, folder)
    return losses


def engine_of(model: Any, optimizer: torch.optim.Optimizer, stage: int) -> Any:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # small parameters stay whole by default, and a filter is small
        zero["stage3_param_persistence_threshold"] = 0
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": BATCH // int(os.environ["WORLD_SIZE"]),
            "zero_optimization": zero,
            # DeepSpeed clips at 1.0 by default
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    return engine


def sharded(stage: int, folder: Path) -> None:
    engine = engine_of(*plugged(), stage)
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(STEPS):
        ids = tokens(step)[rank::world]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    report = {
        "losses": losses,
        "rates": [group["lr"] for group in engine.optimizer.param_groups],
        "held": [f.theta.numel() for f in gfsa.filters_of(engine.module).values()],
        "refusal": "",
    }
    gfsa.save(engine.module, folder / "filters")
    dist.barrier()
    try:
        gfsa.load(engine.module, folder / "filters")
    except ValueError as error:
        report["refusal"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(report), encoding="utf-8")
    dist.barrier()


def cost(stage: int, folder: Path) -> None:
    filtered, plain = tiny_llama(wide=True), tiny_llama(wide=True)
    gfsa.plug(filtered, K=3)
    engines = [engine_of(m, torch.optim.AdamW(m.parameters()), stage) for m in (filtered, plain)]
    ids = torch.randint(64, (2, 256), generator=torch.Generator().manual_seed(0))

    def step(engine: Any) -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    time = time_ratio(lambda: step(engines[0]), lambda: step(engines[1]))
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps({"time": time}), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    (cost if sys.argv[3:] == ["cost"] else sharded)(int(sys.argv[1]), Path(sys.argv[2]))
