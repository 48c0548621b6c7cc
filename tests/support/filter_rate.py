"""What a sharded run with ``gfsa.FilterRate`` must end with: the run of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from scale.workers.filter_rate import FILTER_LR, MODEL_LR, STEPS, FilterTrainer, result_of, trainer
from support.launching import WORKERS, launch


def one_process(folder: Path) -> dict[str, Any]:
    run = trainer(FilterTrainer, folder, processes=1)
    run.train()
    return result_of(run, folder / "filters")


def launched(mode: str, folder: Path, processes: int = 2) -> dict[str, Any]:
    launcher = ["torchrun", "--standalone", f"--nproc-per-node={processes}"]
    launch(launcher, WORKERS / "filter_rate.py", mode, str(folder))
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def check_against_one_process(found: dict[str, Any], expected: dict[str, Any]) -> None:
    # filters moved by tenths: equal to 1e-4 means the same rate, schedule, decay and clipping
    torch.testing.assert_close(
        torch.tensor(found["theta"]), torch.tensor(expected["theta"]), rtol=0, atol=1e-4
    )
    assert max(map(abs, found["theta"])) > FILTER_LR
    assert found["groups"][-1] == ["filters", 0.0]
    falling = [1 - step / STEPS for step in range(STEPS)]
    wanted = torch.tensor([[MODEL_LR * rate, FILTER_LR * rate] for rate in falling])
    torch.testing.assert_close(torch.tensor(expected["rates"]), wanted)
