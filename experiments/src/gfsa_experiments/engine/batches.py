"""Which examples each training step sees: determined by the seed and the step alone.

So a resumed run continues in the middle of an epoch without reading earlier batches again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

from gfsa_experiments.engine.checkpoints import isolated_generators
from gfsa_experiments.engine.config import TrainConfig
from gfsa_experiments.engine.step import to_device
from gfsa_experiments.engine.task import Split, Task

# number of batches whose examples are sorted by length together
_POOL = 50


def epoch_batches(
    count: int,
    batch_size: int,
    seed: int,
    epoch: int,
    lengths: Sequence[int] | None = None,
    drop_last: bool = False,
) -> list[list[int]]:
    """The indices of each batch of one epoch; with ``lengths``, of examples of similar length."""
    generator = np.random.default_rng((seed, epoch))
    order = generator.permutation(count)
    if drop_last:
        # before sorting: afterwards the longest examples would always be left out
        order = order[: count // batch_size * batch_size]
    if lengths is not None:
        sizes = np.asarray(lengths)
        pool = _POOL * batch_size
        parts = [order[at : at + pool] for at in range(0, len(order), pool)]
        order = np.concatenate([p[np.argsort(sizes[p], kind="stable")] for p in parts])
    cuts = range(0, len(order), batch_size)
    batches = [order[at : at + batch_size].tolist() for at in cuts]
    if lengths is not None:
        batches = [batches[i] for i in generator.permutation(len(batches))]
    return batches


class SeededItems(Dataset[Any]):
    """A dataset with random transforms whose items depend on seed, epoch and index alone.

    Transforms of other libraries draw from the global generators of Python, numpy and torch; these
    are seeded for each item and then restored.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        seed = int(np.random.SeedSequence((self.seed, self.epoch, index)).generate_state(1)[0])
        with isolated_generators(seed):
            return self.dataset[index]


def in_order(count: int, batch_size: int, first: int = 0, step: int = 1) -> list[list[int]]:
    """The indices of consecutive batches: of every ``step``-th one, from ``first`` on."""
    starts = range(0, count, batch_size)[first::step]
    return [list(range(start, min(start + batch_size, count))) for start in starts]


def loader_of(
    split: Split, batches: Any, workers: int = 0, pin: bool = False, seed: int = 0
) -> DataLoader[Any]:
    """Batches of a split in a given order; iterating does not change the global random state."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return DataLoader(
        split.dataset,
        batch_sampler=batches,
        collate_fn=split.collate,
        # at most one per core; items do not depend on the number of workers
        num_workers=min(workers, cores),
        pin_memory=pin,
        # from this generator the loader draws the base seed of its workers
        generator=torch.Generator().manual_seed(seed),
    )


class StepBatches:
    """The training batches of this process, on its device, augmented by the task."""

    def __init__(self, task: Task, config: TrainConfig, accelerator: Accelerator) -> None:
        self.task, self.config, self.accelerator = task, config, accelerator
        split, processes = task.splits["train"], accelerator.num_processes
        if config.group_by_length and split.lengths is None:
            raise ValueError("group_by_length=true, but this recipe's examples have no lengths")
        if config.batch_size % processes:
            raise ValueError(
                f"batch_size {config.batch_size} cannot be split among {processes} processes"
            )
        self.drop_last = config.drop_last or processes > 1
        whole, rest = divmod(len(split), config.batch_size)
        self.steps_per_epoch = whole if self.drop_last or not rest else whole + 1
        if not self.steps_per_epoch:
            raise ValueError(
                f"{len(split)} examples make no batch of {config.batch_size}; "
                "set a smaller batch_size or drop_last=false"
            )

    def steps(self, done: int, total: int) -> Iterator[Any]:
        """The batch of each step from ``done`` to ``total``."""
        device, config, split = self.accelerator.device, self.config, self.task.splits["train"]
        while done < total:
            epoch, start = divmod(done, self.steps_per_epoch)
            if hasattr(split.dataset, "epoch"):
                split.dataset.epoch = epoch
            order = self._of_epoch(epoch)[start : start + total - done]
            loader = loader_of(split, order, config.workers, device.type == "cuda", config.seed)
            for batch in loader:
                yield self._augmented(to_device(batch, device), done)
                done += 1

    def _of_epoch(self, epoch: int) -> list[list[int]]:
        """The indices of every batch of this process in an epoch."""
        config, split = self.config, self.task.splits["train"]
        lengths = split.lengths if config.group_by_length else None
        size, seed, processes = config.batch_size, config.seed, self.accelerator.num_processes
        batches = epoch_batches(len(split), size, seed, epoch, lengths, self.drop_last)
        if processes == 1:
            # the last batch of an epoch may be smaller
            return batches
        first = self.accelerator.process_index * size // processes
        return [batch[first : first + size // processes] for batch in batches]

    def _augmented(self, batch: Any, step: int) -> Any:
        """Augment a batch with random numbers that do not depend on the method's dropout."""
        if type(self.task).prepare is Task.prepare:
            return batch
        device = self.accelerator.device
        # the seeds that recorded runs had
        at = (self.config.seed, step, 0, self.accelerator.process_index)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(np.random.SeedSequence(at).generate_state(1)[0]))
            return self.task.prepare(batch)
