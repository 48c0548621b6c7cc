"""Which examples each training step sees: determined by the seed and the step alone.

So a resumed run continues in the middle of an epoch without reading earlier batches again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(eq=False)
class EpochBatches(Sampler[list[int]]):
    """The indices of each batch of one epoch, for one of several processes."""

    count: int
    """Number of examples."""
    batch_size: int
    """Examples per optimiser step."""
    seed: int
    epoch: int
    lengths: Sequence[int] | None = None
    """Sizes of the examples, to group examples of similar size."""
    pieces: int = 1
    """Batches per optimiser step (accumulation × processes)."""
    own_pieces: Sequence[int] = (0,)
    """Those of this process."""
    start: int = 0
    """Optimiser steps of this epoch that are done."""
    drop_last: bool = False
    """Leave out the last, smaller batch; also done if there are several pieces."""

    def __post_init__(self) -> None:
        self.drop_last = self.drop_last or self.pieces > 1

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
        self.steps_per_epoch = self._of_epoch(0, 0).steps()
        if not self.steps_per_epoch:
            raise ValueError(
                f"{len(task.splits['train'])} examples make no batch of {config.batch_size}; "
                "set a smaller batch_size or drop_last=false"
            )

    def steps(self, done: int, total: int) -> Iterator[list[Any]]:
        """The batches of each step from ``done`` to ``total``, one for each accumulation."""
        pin = self.accelerator.device.type == "cuda"
        split, seed = self.task.splits["train"], self.config.seed
        while done < total:
            order = self._of_epoch(*divmod(done, self.steps_per_epoch))
            if hasattr(split.dataset, "epoch"):
                split.dataset.epoch = order.epoch
            loader = loader_of(split, order, self.config.workers, pin, seed)
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
