"""Pretraining in small: a byte-level decoder on the source of Python's standard library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa_experiments.engine.config import (
    Count,
    CountOrZero,
    Positive,
    Schedule,
    TrainConfig,
    check_multiple,
)
from gfsa_experiments.engine.speed import Work
from gfsa_experiments.engine.task import Recipe, Split, Task, as_it_is
from gfsa_experiments.tasks.stdlib.data import read_parts, rows_of, source_folder
from gfsa_experiments.tasks.stdlib.model import ByteDecoder


@dataclass(frozen=True, kw_only=True)
class StdlibConfig(TrainConfig):
    """Settings that were chosen on ``valid`` for the plain model; no files are needed."""

    in_label = ("depth", "width")

    depth: Count = 4
    width: Count = 64
    heads: Count = 4
    block: Count = 64
    """Bytes of a row."""
    init_std: Positive = 0.06
    """Standard deviation of the random weights."""
    evaluations: Count = 10
    """How often ``valid`` is measured."""
    eval_rows: CountOrZero = 256
    """Rows of ``valid`` that are measured, evenly spaced; 0 for all."""
    test_rows: CountOrZero = 1024
    """The same of ``test``."""

    max_steps: int = 500
    batch_size: int = 8
    eval_batch_size: int = 64
    lr: float = 4e-3
    gain_lr: float | None = 0.03
    weight_decay: float = 0.1
    beta2: float = 0.95
    schedule: Schedule = "cosine"
    warmup: float = 0.1
    min_lr: float = 0.1
    drop_last: bool = True

    def check(self) -> None:
        super().check()
        check_multiple(self, "width", "heads")
        if (self.width // self.heads) % 2:
            raise ValueError(
                f"width {self.width} and heads {self.heads} make heads of "
                f"{self.width // self.heads} numbers; RoPE needs an even size"
            )

    def unused(self) -> dict[str, str]:
        unused = super().unused()
        unused["group_by_length"] = "every row has the same length"
        unused["eval_every"] = "evaluations says how often"
        return unused

    def steps_between_evaluations(self, per_epoch: int, total: int) -> int:
        return max(1, math.ceil(total / self.evaluations))

    def sketch(self) -> nn.Module:
        with torch.device("meta"):
            return self.model()

    def model(self) -> ByteDecoder:
        """A new decoder of these sizes."""
        return ByteDecoder(self.depth, self.width, self.heads, self.block, self.init_std)

    def label(self) -> str:
        return f"stdlib decoder-d{self.depth}-w{self.width}"


class StdlibTask(Task):
    """Predict the next byte: ``bits_per_byte = mean of −log₂ p(byte | those before it)``."""

    metric = "bits_per_byte"
    higher_is_better = False

    def __init__(self, config: StdlibConfig, data_dir: Path) -> None:
        text = read_parts(source_folder())
        most = {"valid": config.eval_rows, "test": config.test_rows}
        self.rows = {
            name: rows_of(part, config.block, name, most.get(name, 0))
            for name, part in text.items()
        }
        self.splits = {name: Split(rows, as_it_is) for name, rows in self.rows.items()}
        self.model = config.model()
        weights = sum(p.numel() for p in self.model.parameters() if p.dim() > 1)
        # matrix products alone; causal attention is half of a square
        attention = 6.0 * config.depth * config.width * config.block
        self.work = Work(config.block, config.block * (6.0 * weights + attention))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self._cross_entropy(model, batch, "mean")

    def predict(self, model: nn.Module, batch: Any) -> Any:
        return self._cross_entropy(model, batch, "sum").double(), batch["ids"][:, 1:].numel()

    def score(self, predictions: list[Any]) -> dict[str, float]:
        totals, counts = zip(*predictions, strict=True)
        loss = float(sum(totals)) / sum(counts)
        return {"bits_per_byte": loss / math.log(2), "loss": loss}

    def example(self) -> Tensor:
        """The first rows of the validation text."""
        return self.rows["valid"].columns["ids"][:64, :-1].long()

    def identity(self, split: str, index: int) -> Any:
        """The bytes themselves; those of ``train`` are never augmented, so they count too."""
        return self.rows[split].columns["ids"][index]

    def _cross_entropy(self, model: nn.Module, batch: Any, reduction: str) -> Tensor:
        ids = batch["ids"].long()
        logits = model(ids[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


RECIPE = Recipe(
    name="stdlib",
    title="Pretraining in small: a byte-level decoder on Python's own source, without any files",
    config=StdlibConfig,
    build=StdlibTask,
)
