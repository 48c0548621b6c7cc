"""The batches of each training step: the same for every method, and after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from gfsa_experiments.engine.batches import EpochBatches, training_loader
from gfsa_experiments.engine.config import TrainConfig
from gfsa_experiments.engine.nested import to_device
from gfsa_experiments.engine.task import Task


class StepBatches:
    """The training batches of this process, on its device.

    Args:
        task: has the examples, and how a batch is augmented.
        config: how many examples a step has, and their order.
        accelerator: the devices that share a step.
    """

    def __init__(self, task: Task, config: TrainConfig, accelerator: Accelerator) -> None:
        self.task, self.config, self.accelerator = task, config, accelerator
        self.steps_per_epoch = self._of_epoch(0, 0).steps()
        if not self.steps_per_epoch:
            raise ValueError(
                f"{len(task.splits['train'])} examples make no batch of {config.batch_size}; "
                "set a smaller batch_size or drop_last=false"
            )

    def steps(self, done: int, total: int) -> Iterator[list[Any]]:
        """The batches of each step from ``done`` to ``total``, one for each accumulation."""
        pin = self.accelerator.device.type == "cuda"
        while done < total:
            order = self._of_epoch(*divmod(done, self.steps_per_epoch))
            loader = training_loader(self.task.splits["train"], order, self.config.workers, pin)
            pieces: list[Any] = []
            for batch in loader:
                moved = to_device(batch, self.accelerator.device)
                pieces.append(self._augmented(moved, done, len(pieces)))
                if len(pieces) == self.config.accumulate:
                    yield pieces
                    pieces = []
                    done += 1
                    if done == total:
                        return

    def _augmented(self, batch: Any, step: int, piece: int) -> Any:
        """Augment a batch with random numbers that do not depend on the method's dropout."""
        if type(self.task).prepare is Task.prepare:
            return batch
        device = self.accelerator.device
        at = (self.config.seed, step, piece, self.accelerator.process_index)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(np.random.SeedSequence(at).generate_state(1)[0]))
            return self.task.prepare(batch)

    def _of_epoch(self, epoch: int, start: int) -> EpochBatches:
        """The order of an epoch's examples from its step ``start`` on."""
        config, split = self.config, self.task.splits["train"]
        if config.group_by_length and split.lengths is None:
            raise ValueError("group_by_length=true, but this recipe's examples have no lengths")
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        if config.batch_size % (processes * config.accumulate):
            raise ValueError(
                f"batch_size {config.batch_size} cannot be split among {processes} processes"
                f" × accumulate={config.accumulate}"
            )
        return EpochBatches(
            len(split),
            config.batch_size,
            config.seed,
            epoch,
            lengths=split.lengths if config.group_by_length else None,
            pieces=processes * config.accumulate,
            own_pieces=range(rank * config.accumulate, (rank + 1) * config.accumulate),
            start=start,
            drop_last=config.drop_last,
        )
