"""A recipe so small that the engine itself is what a test sees."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gfsa_experiments.engine.config import TrainConfig
from gfsa_experiments.engine.task import Recipe, Split, Task, as_it_is
from gfsa_experiments.runs.methods import MethodConfig
from gfsa_experiments.runs.run import Run

FILE = "first_seed.txt"


@dataclass(frozen=True, kw_only=True)
class ToyConfig(TrainConfig):
    epochs: float = 2
    batch_size: int = 8
    lr: float = 1e-2
    examples: int = 44
    dropout: float = 0.2
    explode_at: int = -1
    """Make the loss infinite at this step."""
    die: bool = False
    """Kill the process, as the system does when memory runs out."""

    def label(self) -> str:
        return "toy"


class ToyData(Dataset[Any]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 5, 16, generator=generator)
        self.y = (self.x.mean((1, 2)) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        return {"x": self.x[indices], "y": self.y[indices]}


class ToyModel(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class ToyTask(Task):
    metric = "accuracy"

    def __init__(self, config: ToyConfig, first_seed: int = 0) -> None:
        self.config = config
        self.model = ToyModel(config.dropout)
        sizes = {"train": config.examples, "valid": 20, "test": 30}
        self.splits = {
            name: Split(ToyData(size, seed), as_it_is, lengths=[i % 7 for i in range(size)])
            for seed, (name, size) in enumerate(sizes.items(), start=first_seed)
        }
        self.steps = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
        self.steps += 1
        if self.config.die:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss * float("inf") if self.steps == self.config.explode_at else loss

    def prepare(self, batch: Any) -> Any:
        return batch | {"x": batch["x"] + 0.01 * torch.randn_like(batch["x"])}

    def predict(self, model: nn.Module, batch: Any) -> Any:
        return {"right": model(batch["x"]).argmax(-1) == batch["y"]}

    def score(self, predictions: list[Any]) -> dict[str, float]:
        right = torch.cat([p["right"] for p in predictions])
        return {"accuracy": 100 * right.double().mean().item(), "count": float(len(right))}

    def example(self) -> Any:
        return self.splits["valid"].dataset.x  # type: ignore[attr-defined]


def build(config: ToyConfig, data_dir: Path) -> Task:
    """Other numbers if there is a file that says so."""
    file = data_dir / FILE
    return ToyTask(config, int(file.read_text()) if file.exists() else 0)


def write_toy(data_dir: Path, first_seed: int) -> Path:
    """Data of its own."""
    data_dir.mkdir(parents=True)
    (data_dir / FILE).write_text(str(first_seed))
    return data_dir


RECIPE = Recipe("toy", "a toy", ToyConfig, build)


def toy_run(out: Path, method: str = "gfsa", resume: bool = False, **settings: Any) -> Run:
    options = MethodConfig(filter_lr=0.1 if method == "gfsa" else None)
    return Run(
        recipe="support.toy_recipe",
        config=ToyConfig(**settings),
        method=method,
        options=options,
        out=out,
        device="cpu",
        resume=resume,
    )
