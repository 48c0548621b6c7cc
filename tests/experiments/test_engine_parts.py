"""What the training loop is made of: batches, checkpoints, steps, splits, optimisers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset

import gfsa
from gfsa_experiments.engine import step
from gfsa_experiments.engine.batches import SeededItems, epoch_batches
from gfsa_experiments.engine.checkpoints import checkpoint_is_due
from gfsa_experiments.engine.config import TrainConfig
from gfsa_experiments.engine.step import (
    GraphedStep,
    build_optimiser,
    leaves_of,
    map_tensors,
    set_learning_rate,
    share_of_peak,
    signature_of,
    tensors_of,
)
from gfsa_experiments.runs.methods import MethodConfig, added_parameters, find_method
from gfsa_experiments.tasks.pretrain.data import split_documents
from support.toy_recipe import ToyModel


def test_an_epoch_has_every_example_once() -> None:
    for lengths in (None, list(range(103))):
        batches = epoch_batches(103, 10, seed=0, epoch=0, lengths=lengths)
        assert sorted(i for batch in batches for i in batch) == list(range(103))
        assert len(batches) == 11


def test_epochs_and_seeds_differ() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return epoch_batches(100, 10, seed, epoch)[0]

    assert first(0, 0) == first(0, 0)
    assert first(0, 0) != first(0, 1) != first(1, 0)


def test_grouped_batches_are_of_like_length_in_random_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    batches = epoch_batches(1000, 10, seed=0, epoch=0, lengths=lengths.tolist())
    spread = np.mean([np.ptp(lengths[batch]) for batch in batches])
    assert spread < 10
    means = [lengths[batch].mean() for batch in batches]
    assert np.abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.3


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


@dataclass
class _Graphs:
    nodes: Tensor
    count: int


class _Pair(NamedTuple):
    x: Tensor
    y: Any


def batch() -> dict[str, Any]:
    numbers = torch.arange(6.0)
    return {
        "graphs": _Graphs(numbers.view(2, 3), 3),
        "pair": _Pair(numbers[:2], [numbers[2:4], "text"]),
        "tuple": (numbers[4:], None),
    }


def test_every_tensor_is_reached_and_kinds_stay() -> None:
    doubled = map_tensors(lambda tensor: 2 * tensor, batch())
    assert isinstance(doubled["graphs"], _Graphs)
    assert isinstance(doubled["pair"], _Pair)
    assert doubled["pair"].y[1] == "text"
    for one, two in zip(tensors_of(batch()), tensors_of(doubled), strict=True):
        assert torch.equal(2 * one, two)
    assert len(tensors_of(batch())) == 4
    assert [leaf for leaf in leaves_of(batch()) if not isinstance(leaf, Tensor)] == [
        3,
        "text",
        None,
    ]


def test_a_signature_tells_shapes_types_and_the_rest() -> None:
    first = batch()
    assert signature_of(first) == signature_of(batch())
    for name, other in (
        ("tuple", (torch.zeros(3), None)),
        ("tuple", (torch.zeros(2, dtype=torch.long), None)),
        ("graphs", _Graphs(first["graphs"].nodes, 4)),
    ):
        assert signature_of(first | {name: other}) != signature_of(first)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        # at evaluations and at the end of each epoch
        ({}, [4, 6, 8, 12, 16, 18]),
        # as set, and nothing beside it
        ({"checkpoint_every": 7}, [7, 14, 18]),
        ({"checkpoints": False}, []),
    ],
)
def test_when_checkpoints_are_written(settings: dict[str, Any], steps: list[int]) -> None:
    config = TrainConfig(**settings)
    due = [step for step in range(1, 19) if checkpoint_is_due(config, step, 6, 18, step % 4 == 0)]
    assert due == steps


def test_graphs_are_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="one process on one GPU; this run has 1 on cpu"):
        GraphedStep(Accelerator(cpu=True), torch.nn.Linear(1, 1), None, lambda *_: None, 0.0)


def test_more_shapes_than_graphs_are_told_and_still_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step, "_MOST_GRAPHS", 2)
    eager: list[Tensor] = []

    class WithoutGPU(GraphedStep):
        def __init__(self) -> None:
            self._seen, self._graphs = set(), {}

        def _eagerly(self, batch: Any) -> Tensor:
            eager.append(batch)
            return torch.zeros(())

        def _capture(self, batch: Any) -> Any:
            class Graph:
                def replay(self) -> None: ...

            return Graph(), batch.clone(), torch.ones(())

    run = WithoutGPU()
    shapes = [torch.zeros(n) for n in (1, 2, 3)]
    for batch in shapes[:2]:
        assert [float(run(batch)) for _ in range(3)] == [0.0, 1.0, 1.0]
    assert len(eager) == 2
    with pytest.warns(UserWarning, match="more than 2 shapes"):
        assert [float(run(shapes[2])) for _ in range(3)] == [0.0, 0.0, 0.0]
    # those that have graphs go on with them
    assert float(run(shapes[0])) == 1.0


def lengths(parts: dict[str, list[str]]) -> dict[str, list[int]]:
    return {name: [len(document) for document in documents] for name, documents in parts.items()}


def lines(count: int) -> str:
    return "".join(f"line {number:04d}\n" for number in range(count))


@pytest.mark.parametrize("count", [1, 2, 3, 20, 30, 39, 40, 72, 500])
def test_all_of_the_text_is_kept_in_its_order(count: int) -> None:
    documents = [lines(10 + 7 * (number % 5)) for number in range(count)]
    parts = split_documents(documents, "here")
    assert "".join("".join(part) for part in parts.values()) == "".join(documents)
    held_out = sum(len("".join(parts[name])) for name in ("valid", "test"))
    assert 0.1 <= held_out / len("".join(documents)) <= 0.125 + 1e-9 or count == 1
    # at most a document for each of two borders is cut
    found = [document for part in parts.values() for document in part]
    assert len(documents) <= len(found) <= len(documents) + 2
    assert sum(document not in documents for document in found) <= 4


@pytest.mark.parametrize(
    ("text", "borders"),
    [
        # a line end within 2.5 % before each border
        ("x" * 890 + "\n" + "y" * 48 + "\n" + "z" * 60, [891, 49, 60]),
        # no line ends there: a word does
        ("x" * 890 + " " + "y" * 48 + " " + "z" * 60, [891, 49, 60]),
        # a line that ends far before the border would take half of the text to train on with it
        ("x" * 400 + "\n" + "y" * 599, [900, 50, 50]),
    ],
)
def test_a_cut_is_at_the_end_of_a_line_or_a_word_if_one_is_near(
    text: str, borders: list[int]
) -> None:
    parts = lengths(split_documents([text], "here"))
    assert [size for part in parts.values() for size in part] == borders


def test_too_little_text_says_how_much_there_is() -> None:
    with pytest.raises(ValueError, match=r"here is too little .*: it has 5 characters in 1 doc.*;"):
        split_documents(["short"], "here")
    with pytest.raises(ValueError, match="it has 2 characters in 2 documents; give more"):
        split_documents(["a", "b"], "here")


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 4, 8))
        self.linear = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.filter = nn.Parameter(torch.zeros(2, 3))

    def no_weight_decay(self) -> set[str]:
        return {"position"}


def test_every_parameter_is_in_one_group_and_only_weights_are_decayed() -> None:
    """What a baseline adds, a parameter that is no filter, has the filters' rate."""
    model = _Model()
    config = TrainConfig(lr=1e-3, weight_decay=0.1)
    optimiser = build_optimiser(model, [model.filter], config, filter_lr=1e-2)
    found = {
        group["name"]: ([id(p) for p in group["params"]], group["lr"], group["weight_decay"])
        for group in optimiser.param_groups
    }
    assert found == {
        "weights": ([id(model.linear.weight)], 1e-3, 0.1),
        "biases": ([id(model.position), id(model.linear.bias)], 1e-3, 0.0),
        "filters": ([id(model.filter)], 1e-2, 0.0),
    }
    assert set_learning_rate(optimiser, config, 50, 100) == pytest.approx(5e-4)
    assert optimiser.param_groups[2]["lr"] == pytest.approx(5e-3)


@pytest.mark.parametrize("gain_lr", [None, 0.1])
@pytest.mark.parametrize("method", ["plain", "degree1", "gfsa", "twicing"])
def test_groups_are_those_that_users_get(method: str, gain_lr: float | None) -> None:
    """What is measured on a model of transformers or torch is ``gfsa.parameter_groups`` alone."""
    model = ToyModel(0.0)
    options = MethodConfig(filter_lr=1e-2 if method in ("degree1", "gfsa") else None)
    find_method(method).apply(model, options)
    config = TrainConfig(lr=1e-3, weight_decay=0.1, gain_lr=gain_lr)
    groups = build_optimiser(model, added_parameters(model), config, options.filter_lr).param_groups
    rate = 1e-3 if gain_lr is None else gain_lr
    users = gfsa.parameter_groups(model, 1e-3, options.filter_lr, 0.1, gain_lr=rate)
    assert len(groups) == (3 if options.filter_lr else 2)
    for ours, theirs in zip(groups, users, strict=True):
        assert [id(p) for p in ours["params"]] == [id(p) for p in theirs["params"]]
        assert {name: ours[name] for name in ("name", "lr", "weight_decay")} == {
            name: theirs[name] for name in ("name", "lr", "weight_decay")
        }


def test_schedules_rise_fall_and_end_where_told() -> None:
    linear = TrainConfig(warmup=0.1, schedule="linear")
    assert [share_of_peak(linear, s, 100) for s in (0, 9, 10, 55)] == [0.1, 1.0, 1.0, 0.5]
    cosine = TrainConfig(schedule="cosine", min_lr=0.2)
    assert share_of_peak(cosine, 50, 100) == pytest.approx(0.6)
    assert share_of_peak(cosine, 100, 100) == pytest.approx(0.2)
    assert share_of_peak(TrainConfig(schedule="constant"), 70, 100) == 1.0


def test_filters_alone_may_learn() -> None:
    model = _Model().requires_grad_(False)
    model.filter.requires_grad_(True)
    optimiser = build_optimiser(model, [model.filter], TrainConfig(), filter_lr=0.0)
    (group,) = optimiser.param_groups
    # zero is a rate like any other
    assert group["lr"] == 0.0
    model.filter.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        build_optimiser(model, [model.filter], TrainConfig(), filter_lr=None)
