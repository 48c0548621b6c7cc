"""Cut a run short and go on with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gfsa_experiments.engine.task import Task
from gfsa_experiments.runs.row import Row

_OUTCOME = ("test", "valid", "others", "moved", "coefficients", "steps")


def ends_as_if_never_interrupted(
    train: Callable[..., Row], task: type[Task], folder: Path, patch: pytest.MonkeyPatch
) -> None:
    """``train(out, resume=…)`` stops in its third step, goes on, and ends with the same numbers."""
    whole = train(folder / "whole")
    calls: list[int] = []
    loss = task.loss

    def interrupted(self: Task, model: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return loss(self, model, batch)

    with patch.context() as during:
        during.setattr(task, "loss", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(folder / "cut")
    resumed = train(folder / "cut", resume=True)
    assert [getattr(resumed, n) for n in _OUTCOME] == [getattr(whole, n) for n in _OUTCOME]
