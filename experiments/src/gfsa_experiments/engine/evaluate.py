"""Evaluate a model on a split."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from gfsa_experiments.engine.batches import evaluation_loader, in_order
from gfsa_experiments.engine.config import TrainConfig
from gfsa_experiments.engine.nested import map_tensors, to_device
from gfsa_experiments.engine.sharding import is_sharded
from gfsa_experiments.engine.task import Task


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, split: str, config: TrainConfig, accelerator: Accelerator
) -> dict[str, float]:
    """The task's metrics on ``split``; several processes share the batches."""
    rank, processes = accelerator.process_index, accelerator.num_processes
    data = task.splits[split]
    size = config.eval_batch_size or config.batch_size
    order = in_order(len(data), size, rank, processes)
    own = len(order)
    if is_sharded(accelerator):
        # the processes compute together: one that has a batch less repeats the first of all
        first, *_ = shares = in_order(len(data), size, 0, processes)
        order += [first] * (len(shares) - own)
    loader = evaluation_loader(data, order, config.workers, pin=accelerator.device.type == "cuda")
    was_training = model.training
    model.eval()
    try:
        predictions = []
        for batch in loader:
            with accelerator.autocast():
                predicted = task.predict(model, to_device(batch, accelerator.device))
            predictions.append(predicted)
        predictions = predictions[:own]
        predictions = map_tensors(lambda tensor: tensor.cpu(), predictions)
    finally:
        model.train(was_training)
    if processes > 1:
        predictions = _in_order(gather_object([predictions]))
    scores = task.score(predictions)
    if task.metric not in scores:
        raise KeyError(
            f"the task reports {task.metric!r}, but its score() gave {', '.join(scores)}"
        )
    return {name: float(value) for name, value in scores.items()}


def _in_order(shares: list[list[Any]]) -> list[Any]:
    """The batches of all processes, which took them in turn, in their original order."""
    longest = max(len(share) for share in shares)
    return [share[i] for i in range(longest) for share in shares if i < len(share)]
