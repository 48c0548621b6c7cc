"""Steps replayed from graphs; what can be asked of them without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from gfsa_experiments.engine import train_step as step
from gfsa_experiments.engine.train_step import GraphedStep


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
        assert [float(run([batch])) for _ in range(3)] == [0.0, 1.0, 1.0]
    assert len(eager) == 2
    with pytest.warns(UserWarning, match="more than 2 shapes"):
        assert [float(run([shapes[2]])) for _ in range(3)] == [0.0, 0.0, 0.0]
    # those that have graphs go on with them
    assert float(run([shapes[0]])) == 1.0
