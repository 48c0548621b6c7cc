"""The state of the training loop: saved in checkpoints, and continued from by a resumed run."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from gfsa.lens.trajectory import Trajectory
from gfsa_experiments.engine.checkpoints import (
    checkpoints,
    read_state,
    without_note_of_tied_weights,
    write_checkpoint,
)
from gfsa_experiments.engine.randomness import load_randomness, save_randomness
from gfsa_experiments.engine.run_log import RunLog

_BEST = "best.pt"


@dataclass
class Position:
    """The position of the training loop; all of it goes into a checkpoint."""

    step: int = 0
    seconds: float = 0.0
    best_score: float | None = None
    best_step: int = 0
    worse: int = 0
    stopped: bool = False
    curve: list[dict[str, float]] = field(default_factory=list)
    """The validations so far: step, tokens, seconds of training, metric."""
    start: float | None = None
    """What the task's falling metric was on ``valid`` before the first step."""

    def judge(self, score: float, higher_is_better: bool, patience: int) -> bool:
        """Note the score of a validation; returns whether it is the best so far.

        Args:
            patience: training stops after so many scores in a row that are no better; 0 for never.
        """
        sign = 1 if higher_is_better else -1
        better = self.best_score is None or sign * (score - self.best_score) > 0
        if math.isfinite(score) and better:
            self.best_score, self.best_step, self.worse = score, self.step, 0
            return True
        self.worse += 1
        self.stopped = bool(patience) and self.worse >= patience
        return False


@dataclass
class LoopState:
    """What a resumed run continues with, beside its model, optimiser, log and random numbers."""

    trajectory: Trajectory
    """The filters' coefficients over training."""
    position: Position = field(default_factory=Position)
    rates: list[float] = field(default_factory=list)
    """Seconds per step, each the mean over the steps between two lines of the log."""
    best: dict[str, Tensor] | None = None
    """The weights with the best validation, if they are kept."""


class LoopCheckpoints:
    """Saves the training loop of one run, and continues from what was saved.

    Args:
        folder: of the run.
        accelerator: knows the model and the optimiser.
        optimiser: whose rates are moved to the device.
        log: of the run.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, optimiser: Any, log: RunLog) -> None:
        self.folder = folder
        self.accelerator = accelerator
        self.optimiser = optimiser
        self.log = log
        self._randomness_file = f"randomness-{accelerator.process_index}.pt"

    def save(self, state: LoopState, kept: int) -> None:
        """Write a checkpoint, and the log; so many of the newest checkpoints are kept."""

        def save(folder: Path) -> None:
            with without_note_of_tied_weights():
                self.accelerator.save_state(str(folder / "state"))
            save_randomness(folder / self._randomness_file)
            if state.best is not None and self.accelerator.is_main_process:
                torch.save(state.best, folder / _BEST)

        plain = {
            "position": vars(state.position),
            "history": self.log.history,
            "rates": state.rates,
            "coefficients": state.trajectory.to_plain(),
        }
        folder = self.folder / "checkpoints"
        write_checkpoint(folder, state.position.step, plain, save, self.accelerator, kept)
        self.log.write_metrics()

    def resume(self, state: LoopState) -> LoopState:
        """Continue from the newest checkpoint that can be read; from ``state`` without any."""
        found = checkpoints(self.folder / "checkpoints")
        for checkpoint in found:
            try:
                resumed = self._load(checkpoint, state.trajectory)
                self._say(f"resumed after step {resumed.position.step}")
                return resumed
            except Exception as error:
                if self.accelerator.num_processes > 1:
                    # other processes may have read it: all continue from the same step
                    raise ValueError(f"{checkpoint} cannot be read, delete it: {error}") from error
                warnings.warn(f"{checkpoint} cannot be read and is skipped: {error}", stacklevel=2)
        if found:
            raise ValueError(f"no checkpoint in {found[0].parent} can be read; delete it")
        self._say("has no checkpoint, begins with step 1")
        return state

    def _load(self, checkpoint: Path, trajectory: Trajectory) -> LoopState:
        plain = read_state(checkpoint)
        self.accelerator.load_state(str(checkpoint / "state"))
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                # accelerate loads it to the CPU; a CUDA graph reads it from the device
                group["lr"] = group["lr"].to(self.accelerator.device)
        state = LoopState(trajectory, Position(**plain["position"]), plain["rates"])
        best = checkpoint / _BEST
        if best.exists():
            # torch loads to no "cpu:1", which is the device of one of several processes on a CPU
            weights = torch.load(best, map_location="cpu", weights_only=True)
            device = self.accelerator.device
            state.best = {name: tensor.to(device) for name, tensor in weights.items()}
        self.log.history = plain["history"]
        if "coefficients" in plain:
            # checkpoints of earlier versions have none
            state.trajectory = Trajectory.from_plain(plain["coefficients"])
        load_randomness(checkpoint / self._randomness_file)
        return state

    def _say(self, text: str) -> None:
        """Print once what a resumed run does: its end does not show where it began."""
        if self.accelerator.is_main_process:
            print(f"{self.folder}: {text}", flush=True)
