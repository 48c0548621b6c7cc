"""What is measured while a model trains: the mean loss, the time of a step, the peak of memory."""

from __future__ import annotations

import gc
import time
from typing import NamedTuple

import torch
from torch import Tensor


class Pace(NamedTuple):
    """The steps since the last reading."""

    loss: float
    """Their mean."""
    steps: int
    seconds_per_step: float | None
    """None if no step was timed."""

    @property
    def seconds(self) -> float:
        """Of all steps: those that were not timed count as the mean of the others."""
        return self.steps * (self.seconds_per_step or 0.0)


class StepMeter:
    """The mean loss and the time of training steps, from one reading to the next.

    Losses are summed on the device, so that the host waits for it at a reading only.

    Args:
        device: where the losses are.
        untimed: how many of the first steps are not timed, because they compile.
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
        return Pace(loss, self._steps, seconds)

    def restart(self) -> None:
        """Begin with the next step, whatever was measured or done since the reading."""
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
    """The most memory of a GPU that training takes; on a CPU nothing is measured."""

    def __init__(self, device: torch.device) -> None:
        self._measures = device.type == "cuda"
        self._most = 0

    def start(self) -> None:
        """Forget what the GPU's memory was used for before."""
        if self._measures:
            torch.cuda.reset_peak_memory_stats()

    def stop(self) -> None:
        """Count the memory that was used since the start."""
        if self._measures:
            self._most = max(self._most, torch.cuda.max_memory_allocated())

    @property
    def mib(self) -> float | None:
        return round(self._most / 2**20, 1) if self._most else None
