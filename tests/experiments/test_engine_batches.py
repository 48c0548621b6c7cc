"""Batches are a function of seed, epoch and step."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
from torch.utils.data import Dataset

from gfsa_experiments.engine.batches import EpochBatches, SeededItems, evaluation_loader, in_order
from gfsa_experiments.engine.task import Split


def test_an_epoch_has_every_example_once() -> None:
    for lengths in (None, list(range(103))):
        batches = list(EpochBatches(103, 10, seed=0, epoch=0, lengths=lengths))
        assert sorted(i for batch in batches for i in batch) == list(range(103))
        assert len(batches) == 11


def test_epochs_and_seeds_differ() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return next(iter(EpochBatches(100, 10, seed, epoch)))

    assert first(0, 0) == first(0, 0)
    assert first(0, 0) != first(0, 1) != first(1, 0)


def test_started_late_it_goes_on_with_the_rest() -> None:
    whole = list(EpochBatches(50, 8, seed=3, epoch=2))
    assert list(EpochBatches(50, 8, seed=3, epoch=2, start=3)) == whole[3:]


def test_pieces_make_up_the_batch() -> None:
    whole = list(EpochBatches(50, 8, seed=0, epoch=0, drop_last=True))
    parts = [
        list(EpochBatches(50, 8, seed=0, epoch=0, pieces=4, own_pieces=(2 * rank, 2 * rank + 1)))
        for rank in range(2)
    ]
    for step, batch in enumerate(whole):
        pieces = [piece for part in parts for piece in part[2 * step : 2 * step + 2]]
        assert [i for piece in pieces for i in piece] == batch


def test_grouped_batches_are_of_like_length_in_random_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    batches = list(EpochBatches(1000, 10, seed=0, epoch=0, lengths=lengths.tolist()))
    spread = np.mean([np.ptp(lengths[batch]) for batch in batches])
    assert spread < 10
    means = [lengths[batch].mean() for batch in batches]
    assert np.abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.3


def test_what_is_dropped_is_not_always_the_longest() -> None:
    lengths = list(range(23))
    dropped = [
        set(range(23)) - {i for b in EpochBatches(23, 5, 0, e, lengths, drop_last=True) for i in b}
        for e in range(4)
    ]
    assert all(len(left) == 3 for left in dropped)
    assert len(set.union(*dropped)) > 6


class _Noise(Dataset[float]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return random.random() + float(np.random.rand()) + float(torch.rand(()))


def test_random_items_depend_on_seed_epoch_and_index_alone() -> None:
    items = SeededItems(_Noise(), seed=0)
    before = torch.random.get_rng_state()
    first = [items[i] for i in range(4)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [items[i] for i in (3, 2, 1, 0)] == first[::-1]
    assert len(set(first)) == 4
    items.epoch = 1
    assert items[0] != first[0]
    assert SeededItems(_Noise(), seed=1)[0] != first[0]


def test_there_are_no_more_readers_than_cores() -> None:
    split = Split(_Noise(), collate=list)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    order = in_order(6, 2)
    assert order == [[0, 1], [2, 3], [4, 5]]
    assert in_order(7, 2, first=1, step=2) == [[2, 3], [6]]
    assert evaluation_loader(split, order, 10**6).num_workers == cores
    assert evaluation_loader(split, order, 0).num_workers == 0
