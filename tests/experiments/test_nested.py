"""Batches of any shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gfsa_experiments.engine.nested import (
    leaves_of,
    map_tensors,
    signature_of,
    tensors_of,
    to_device,
)


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


def test_moving_keeps_the_batch() -> None:
    moved = to_device(batch(), torch.device("cpu"))
    assert signature_of(moved) == signature_of(batch())


def test_a_signature_tells_shapes_types_and_the_rest() -> None:
    first = batch()
    assert signature_of(first) == signature_of(batch())
    for name, other in (
        ("tuple", (torch.zeros(3), None)),
        ("tuple", (torch.zeros(2, dtype=torch.long), None)),
        ("graphs", _Graphs(first["graphs"].nodes, 4)),
    ):
        assert signature_of(first | {name: other}) != signature_of(first)
