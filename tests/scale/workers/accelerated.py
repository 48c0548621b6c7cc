"""Run by ``accelerate launch``: train filters on half a batch a process, and on the whole of it.

accelerate launch --multi_gpu --num_processes=2 tests/scale/workers/accelerated.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import gfsa
from support.subjects import SUBJECTS
from support.zoo import VOCABULARY

STEPS, BATCH = 3, 4


def rows() -> Tensor:
    return torch.randint(
        3, VOCABULARY, (STEPS * BATCH, 8), generator=torch.Generator().manual_seed(2)
    )


def model_and_optimizer() -> Any:
    model = SUBJECTS["GPT-2"].plugged().double()
    groups = gfsa.parameter_groups(model, lr=1e-2, filter_lr=1.0)
    return model, torch.optim.SGD(groups)


def theta_of(model: Any) -> Tensor:
    return torch.cat([f.theta.detach().flatten() for f in gfsa.filters_of(model).values()])


def main() -> None:
    torch.set_num_threads(1)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = model_and_optimizer()
    start = theta_of(model)
    loader = torch.utils.data.DataLoader(rows(), batch_size=BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for ids in loader:
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    theta = theta_of(model)

    alone, optimizer = model_and_optimizer()
    for ids in rows().split(BATCH):
        alone(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    result = {
        "processes": accelerator.num_processes,
        "theta": theta.tolist(),
        "moved": (theta - start).abs().max().item(),
        "distance to one process": (theta - theta_of(alone)).abs().max().item(),
    }
    file = Path(sys.argv[1]) / f"rank{accelerator.process_index}.json"
    file.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
