"""After which steps a checkpoint is due."""

from __future__ import annotations

from typing import Any

import pytest

from gfsa_experiments.engine.checkpoint_times import CheckpointTimes
from gfsa_experiments.engine.config import TrainConfig


def saved(per_epoch: int, total: int, evaluated_every: int, **settings: Any) -> list[int]:
    """The steps after which a run saves."""
    times = CheckpointTimes(TrainConfig(**settings), per_epoch, total, last=0)
    found = []
    for step in range(1, total + 1):
        if times.kept(step, evaluates=step % evaluated_every == 0):
            times.last = step
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("of_run", "steps"),
    [
        # ten evaluations of one epoch: each
        ({"per_epoch": 50, "total": 50, "evaluated_every": 5}, list(range(5, 51, 5))),
        # an evaluation at each step: ten
        ({"per_epoch": 50, "total": 50, "evaluated_every": 1}, list(range(5, 51, 5))),
        # part of an epoch
        ({"per_epoch": 500, "total": 20, "evaluated_every": 2}, list(range(2, 21, 2))),
        # an evaluation at the end of each epoch, as before
        ({"per_epoch": 6, "total": 18, "evaluated_every": 6}, [6, 12, 18]),
        ({"per_epoch": 6, "total": 18, "evaluated_every": 48}, [6, 12, 18]),
        # as set, and nothing beside it
        ({"per_epoch": 9, "total": 9, "evaluated_every": 1, "checkpoint_every": 4}, [4, 8, 9]),
        ({"per_epoch": 9, "total": 9, "evaluated_every": 1, "checkpoints": False}, []),
    ],
)
def test_when(of_run: dict[str, Any], steps: list[int]) -> None:
    assert saved(**of_run) == steps


def test_within_an_epoch_one_is_kept() -> None:
    times = CheckpointTimes(TrainConfig(), per_epoch=50, total=100, last=0)
    assert [times.kept(step, evaluates=True) for step in (4, 5, 49, 50, 100)] == [0, 1, 1, 2, 2]
