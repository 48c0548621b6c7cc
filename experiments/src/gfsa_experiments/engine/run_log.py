"""What a run records while it trains: the history of its metrics, TensorBoard's log, its curve."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gfsa
from gfsa.lens.trajectory import Trajectory
from gfsa_experiments.engine.whole_files import write_text

COEFFICIENTS = "coefficients.csv"


class RunLog:
    """The history of a run, ``metrics.jsonl`` in its folder, and a log for TensorBoard.

    The history has no times in it, so that two runs of one seed have the same history.

    Args:
        folder: of the run.
        writes: whether this process writes files.
    """

    def __init__(self, folder: Path, writes: bool) -> None:
        self.folder, self.writes = folder, writes
        self.history: list[dict[str, Any]] = []
        self._tensorboard: Any = None

    def open_tensorboard(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self.writes:
            self._tensorboard = SummaryWriter(str(self.folder / "tensorboard"))

    def add(self, line: dict[str, Any], **beside: Any) -> None:
        """Add a line to the history and to TensorBoard, which gets the values ``beside`` it too."""
        self.history.append(line)
        if self._tensorboard is not None:
            for name, value in (line | beside).items():
                if name != "step" and value is not None:
                    self._tensorboard.add_scalar(name, value, line["step"])

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()

    def write_metrics(self) -> None:
        """Write ``metrics.jsonl``: the metrics over time, one JSON object per line."""
        if self.writes:
            lines = [json.dumps(line) + "\n" for line in self.history]
            write_text(self.folder / "metrics.jsonl", "".join(lines))

    def write_curve(self, curve: list[dict[str, float]]) -> None:
        """Write ``curve.csv``: a line per validation with step, tokens, seconds and metric."""
        if self.writes and curve:
            text = io.StringIO()
            writer = csv.DictWriter(text, list(curve[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(curve)
            write_text(self.folder / "curve.csv", text.getvalue())

    def write_coefficients(self, trajectory: Trajectory) -> None:
        """Write ``coefficients.csv``: those of every filter that learns, at every validation."""
        if self.writes and trajectory.layers:
            write_text(self.folder / COEFFICIENTS, trajectory.to_text())


class Movement:
    """How far the learned numbers of a model's filters are from their start."""

    def __init__(self, model: nn.Module) -> None:
        found = gfsa.filters_of(model).items()
        self._filters: dict[str, Any] = {
            name: f for name, f in found if getattr(f, "theta", None) is not None
        }
        self._start = {name: f.theta.detach().clone() for name, f in self._filters.items()}

    def mean(self) -> float | None:
        """Mean |coefficient − its start| over the learned numbers of all filters."""
        if not self._start:
            return None
        steps = [
            ((_whole(f.theta) - self._start[name]) * f.lr_multiplier).abs().flatten()
            for name, f in self._filters.items()
        ]
        return float(torch.cat(steps).mean())


def _whole(theta: Any) -> Tensor:
    """A filter's numbers; where they are sharded, every process has to ask for them."""
    gathered: Tensor = theta.full_tensor() if hasattr(theta, "full_tensor") else theta
    return gathered.detach()
