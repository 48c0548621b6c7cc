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
from torch.utils.data import DataLoader, Dataset, Sampler

from gfsa_experiments.engine.checkpoints import isolated_generators
from gfsa_experiments.engine.config import TrainConfig
from gfsa_experiments.engine.step import to_device
from gfsa_experiments.engine.task import Split, Task

# number of batches whose examples are sorted by length together
_POOL = 50


class EpochBatches(Sampler[list[int]]):
    """The indices of each batch of one epoch, for one of several processes.

    Args:
        count: number of examples.
        batch_size: examples per optimiser step.
        seed, epoch: determine the order.
        lengths: sizes of the examples, to group examples of similar size.
        pieces: batches per optimiser step (accumulation × processes).
        own_pieces: the pieces of this process.
        start: optimiser steps of this epoch that are done.
        drop_last: leave out the last, smaller batch; also done if there are several pieces.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        seed: int,
        epoch: int,
        lengths: Sequence[int] | None = None,
        pieces: int = 1,
        own_pieces: Sequence[int] = (0,),
        start: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.count, self.batch_size = count, batch_size
        self.seed, self.epoch = seed, epoch
        self.lengths = lengths
        self.pieces, self.own_pieces = pieces, tuple(own_pieces)
        self.start = start
        self.drop_last = drop_last or pieces > 1

    def steps(self) -> int:
        """Optimiser steps in a whole epoch."""
        whole, rest = divmod(self.count, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def __len__(self) -> int:
        return (self.steps() - self.start) * len(self.own_pieces)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._order()[self.start :]:
            share = len(batch) // self.pieces
            for piece in self.own_pieces:
                yield batch[piece * share : (piece + 1) * share]

    def _order(self) -> list[list[int]]:
        generator = np.random.default_rng((self.seed, self.epoch))
        order = generator.permutation(self.count)
        if self.drop_last:
            # before sorting: afterwards the longest examples would always be left out
            order = order[: self.steps() * self.batch_size]
        if self.lengths is not None:
            sizes = np.asarray(self.lengths)
            pool = _POOL * self.batch_size
            parts = [order[at : at + pool] for at in range(0, len(order), pool)]
            order = np.concatenate([p[np.argsort(sizes[p], kind="stable")] for p in parts])
        cuts = range(0, self.steps() * self.batch_size, self.batch_size)
        batches = [order[at : at + self.batch_size].tolist() for at in cuts]
        if self.lengths is not None:
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
    """The indices of consecutive batches, of which every ``step``-th from ``first`` on."""
    starts = range(0, count, batch_size)[first::step]
    return [list(range(start, min(start + batch_size, count))) for start in starts]


def training_loader(
    split: Split, batches: EpochBatches, workers: int = 0, pin: bool = False
) -> DataLoader[Any]:
    """Batches of one epoch; iterating does not change the global random state."""
    if hasattr(split.dataset, "epoch"):
        split.dataset.epoch = batches.epoch
    return _loader(split, batches, batches.seed, workers, pin)


def evaluation_loader(
    split: Split, batches: list[list[int]], workers: int = 0, pin: bool = False
) -> DataLoader[Any]:
    """Batches of a split in a given order."""
    return _loader(split, batches, 0, workers, pin)


def _loader(split: Split, batches: Any, seed: int, workers: int, pin: bool) -> DataLoader[Any]:
    return DataLoader(
        split.dataset,
        batch_sampler=batches,
        collate_fn=split.collate,
        num_workers=_at_most_cores(workers),
        pin_memory=pin,
        # from this generator the loader draws the base seed of its workers
        generator=torch.Generator().manual_seed(seed),
    )


def _at_most_cores(workers: int) -> int:
    """``workers``, at most one per core; items do not depend on the number of workers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(workers, cores or 1)


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
