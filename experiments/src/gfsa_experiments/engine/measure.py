"""What a run measures and records: loss, time, memory, speed, history and coefficients."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from accelerate import Accelerator
from torch import Tensor, nn

import gfsa
from gfsa_experiments.engine.checkpoints import LoopState
from gfsa_experiments.engine.whole_files import write_text

Progress = Callable[[str, bool], None]
"""Called every ``log_every`` steps, at evaluations and at checkpoints with ``step 50 of 900, loss
2.61, valid loss 2.59, 812,000 tokens/s`` and whether there was a validation."""


class StepMeter:
    """The mean loss, the time and the memory of training steps, from one reading to the next.

    Losses are summed on the device, so that the host waits for it at a reading only.
    """

    def __init__(self, device: torch.device) -> None:
        self._losses = torch.zeros((), device=device)
        self.mib: float | None = None
        """The most memory that steps have taken on a GPU."""

    def begin(self, untimed: int = 0) -> None:
        """Begin with the next step, but time none of the first ``untimed``, which compile."""
        self._losses.zero_()
        self._steps, self._untimed, self._since = 0, untimed, time.perf_counter()
        if self._losses.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def add(self, loss: Tensor) -> None:
        """Count a step."""
        self._losses += loss
        self._steps += 1
        if self._steps == self._untimed:
            # waits for the device, so that the time begins after what is not timed
            float(self._losses)
            self._since = time.perf_counter()

    def read(self) -> tuple[float, float, float | None]:
        """The mean loss, seconds, and seconds per step; waits for the device.

        Steps that were not timed count as the mean of the others; None if none was timed.
        """
        loss = float(self._losses) / self._steps
        timed = self._steps - self._untimed
        pace = (time.perf_counter() - self._since) / timed if timed else None
        if self._losses.is_cuda:
            used = round(torch.cuda.max_memory_allocated() / 2**20, 1)
            self.mib = max(self.mib or 0.0, used)
        return loss, self._steps * (pace or 0.0), pace


def free_memory_of_earlier_runs(device: torch.device) -> None:
    """Give back what an earlier run of this process left; it would count as this run's."""
    gc.collect()
    if device.type == "cuda":
        # cuBLAS keeps 64 MiB for every stream it has worked on, and a captured step has its own
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


class RunLog:
    """The files in a run's folder that show its history, and a log for TensorBoard.

    The history has no times in it, so that two runs of one seed have the same history.
    """

    def __init__(self, folder: Path, state: LoopState, accelerator: Accelerator) -> None:
        self.folder, self.state, self.accelerator = folder, state, accelerator
        if accelerator.log_with:
            accelerator.init_trackers("tensorboard")

    def add(self, step: int, values: dict[str, Any], **beside: Any) -> None:
        """Add a line to the history and to TensorBoard, which gets the values ``beside`` it too."""
        self.state.history.append({"step": step} | values)
        self.accelerator.log(values | beside, step)

    def close(self) -> None:
        # accelerate's end_training would end the processes too
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def write(self) -> None:
        """Write ``metrics.jsonl`` and ``curve.csv``."""
        if not self.accelerator.is_main_process:
            return
        lines = [json.dumps(line) + "\n" for line in self.state.history]
        write_text(self.folder / "metrics.jsonl", "".join(lines))
        if self.state.curve:
            curve = pd.DataFrame(self.state.curve).to_csv(index=False, lineterminator="\n")
            write_text(self.folder / "curve.csv", curve)


class Movement:
    """How far the learned numbers of a model's filters are from their start."""

    def __init__(self, model: nn.Module) -> None:
        filters: list[Any] = [*gfsa.filters_of(model).values()]
        thetas = [(f, getattr(f, "theta", None)) for f in filters]
        self._start = [(f, theta.detach().clone()) for f, theta in thetas if theta is not None]

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
