"""What a run measures and records: loss, time, memory, speed, history and coefficients."""

from __future__ import annotations

import csv
import gc
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gfsa
from gfsa.lens.trajectory import Trajectory
from gfsa_experiments.engine.whole_files import write_text

Progress = Callable[[str, bool], None]
"""Called every ``log_every`` steps, at evaluations and at checkpoints with ``step 50 of 900, loss
2.61, valid loss 2.59, 812,000 tokens/s`` and whether there was a validation."""


class Pace(NamedTuple):
    """The steps since the last reading."""

    loss: float
    """Their mean."""
    seconds: float
    """Of all steps: those that were not timed count as the mean of the others."""
    seconds_per_step: float | None
    """None if no step was timed."""


class StepMeter:
    """The mean loss and the time of training steps, from one reading to the next.

    Losses are summed on the device, so that the host waits for it at a reading only. The first
    ``untimed`` steps are not timed, because they compile.
    """

    def __init__(self, device: torch.device, untimed: int = 0) -> None:
        self._losses = torch.zeros((), device=device)
        self._untimed = untimed
        self._steps, self._since = 0, time.perf_counter()

    def add(self, loss: Tensor) -> None:
        """Count a step."""
        self._losses += loss
        self._steps += 1
        if self._steps == self._untimed:
            # waits for the device, so that the time begins after what is not timed
            float(self._losses)
            self._since = time.perf_counter()

    def read(self) -> Pace:
        """The steps so far; waits for the device."""
        loss = float(self._losses) / self._steps
        timed = self._steps - self._untimed
        seconds = (time.perf_counter() - self._since) / timed if timed else None
        return Pace(loss, self._steps * (seconds or 0.0), seconds)

    def restart(self) -> None:
        """Begin with the next step; what happened since the reading does not count."""
        self._losses.zero_()
        self._steps, self._untimed, self._since = 0, 0, time.perf_counter()


def free_memory_of_earlier_runs(device: torch.device) -> None:
    """Give back what an earlier run of this process left; it would count as this run's."""
    gc.collect()
    if device.type == "cuda":
        # cuBLAS keeps 64 MiB for every stream it has worked on, and a captured step has its own
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


class PeakMemory:
    """The most memory of a GPU between start and stop; on a CPU nothing is measured."""

    def __init__(self, device: torch.device) -> None:
        self._measures = device.type == "cuda"
        self.mib: float | None = None

    def start(self) -> None:
        if self._measures:
            torch.cuda.reset_peak_memory_stats()

    def stop(self) -> None:
        if self._measures:
            used = round(torch.cuda.max_memory_allocated() / 2**20, 1)
            self.mib = max(self.mib or 0.0, used)


COEFFICIENTS = "coefficients.csv"


class RunLog:
    """The history of a run, ``metrics.jsonl`` in its folder, and a log for TensorBoard.

    The history has no times in it, so that two runs of one seed have the same history. Only the
    process that ``writes`` writes files.
    """

    def __init__(self, folder: Path, writes: bool, tensorboard: bool) -> None:
        self.folder, self.writes = folder, writes
        self.history: list[dict[str, Any]] = []
        self._tensorboard: Any = None
        if writes and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / "tensorboard"))

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

    def write(self, curve: list[dict[str, float]] | None = None) -> None:
        """Write ``metrics.jsonl``, a JSON object per line, and the ``curve`` of validations."""
        if not self.writes:
            return
        lines = [json.dumps(line) + "\n" for line in self.history]
        write_text(self.folder / "metrics.jsonl", "".join(lines))
        if curve:
            text = io.StringIO()
            writer = csv.DictWriter(text, list(curve[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(curve)
            write_text(self.folder / "curve.csv", text.getvalue())

    def write_coefficients(self, trajectory: Trajectory) -> None:
        """Write those of every filter that learns, at every validation."""
        if self.writes and trajectory.layers:
            write_text(self.folder / COEFFICIENTS, trajectory.to_text())


class Movement:
    """How far the learned numbers of a model's filters are from their start."""

    def __init__(self, model: nn.Module) -> None:
        filters: list[Any] = [*gfsa.filters_of(model).values()]
        learned = [f for f in filters if getattr(f, "theta", None) is not None]
        self._start = [(f, f.theta.detach().clone()) for f in learned]

    def mean(self) -> float | None:
        """Mean |coefficient − its start| over the learned numbers of all filters."""
        if not self._start:
            return None
        steps = []
        for f, start in self._start:
            # where numbers are sharded, every process has to ask for them
            theta = f.theta.full_tensor() if hasattr(f.theta, "full_tensor") else f.theta
            steps.append(((theta.detach() - start) * f.lr_multiplier).abs().flatten())
        return float(torch.cat(steps).mean())
