"""Random generators, the state of the training loop, and the checkpoints a run resumes from.

Checkpoints survive ``kill -9`` at any moment: a checkpoint is a folder that is written under a
temporary name, flushed to the disk and then renamed, so a folder called ``step-…`` is complete.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import load
from torch import Tensor

from gfsa_experiments.engine.config import TrainConfig


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def isolated_generators(seed: int) -> Iterator[None]:
    """Seed the CPU's generators inside the block; afterwards they have their old state."""
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.random.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, the newest first."""
    # one that was being deleted when the machine stopped may have lost its state
    states = folder.glob("step-*/loop.pt")
    return sorted((path.parent for path in states), reverse=True)


# if the newest is damaged, the run goes on from the one before
_KEPT = 2


def checkpoint_is_due(
    config: TrainConfig, step: int, per_epoch: int, total: int, evaluates: bool
) -> bool:
    """At evaluations and at the end of each epoch; or every so many steps, as set.

    At an evaluation the loss is read anyway, so a checkpoint there leaves the log as it is without.
    """
    every = config.checkpoint_every
    regular = step % (every or per_epoch) == 0 or step == total
    return config.checkpoints and (regular or (evaluates and not every))


@dataclass
class LoopState:
    """What a resumed run continues with, beside its model, optimiser and random numbers."""

    history: list[dict[str, Any]] = field(default_factory=list)
    """The lines of the log."""
    step: int = 0
    seconds: float = 0.0
    best_score: float | None = None
    worse: int = 0
    stopped: bool = False
    curve: list[dict[str, float]] = field(default_factory=list)
    """The validations so far: step, tokens, seconds of training, metric."""
    start: float | None = None
    """What the task's falling metric was on ``valid`` before the first step."""
    rates: list[float] = field(default_factory=list)
    """Seconds per step, each the mean over the steps between two lines of the log."""
    best: dict[str, Tensor] | None = None
    """The weights with the best validation, if they are kept."""
    valid: dict[str, float] | None = None
    """The metrics of the weights to report: the best if they are kept, else the last."""

    def judge(self, score: float, higher_is_better: bool, patience: int) -> bool:
        """Note the score of a validation; returns whether it is the best so far.

        Training stops after ``patience`` scores in a row that are no better; 0 for never.
        """
        sign = 1 if higher_is_better else -1
        better = self.best_score is None or sign * (score - self.best_score) > 0
        if math.isfinite(score) and better:
            self.best_score, self.worse = score, 0
            return True
        self.worse += 1
        self.stopped = bool(patience) and self.worse >= patience
        return False


class LoopCheckpoints:
    """Saves the training loop of one run, and continues from what was saved."""

    def __init__(
        self, folder: Path, accelerator: Accelerator, optimiser: Any, state: LoopState
    ) -> None:
        self.run, self.folder = folder, folder / "checkpoints"
        self.accelerator, self.optimiser, self.state = accelerator, optimiser, state

    def save(self) -> None:
        """Write a checkpoint and delete older ones; every process calls this."""
        accelerator, step = self.accelerator, self.state.step
        unfinished, finished = self.folder / f".writing-{step}", self.folder / f"step-{step:09d}"
        if accelerator.is_main_process:
            for leftover in self.folder.glob(".writing-*"):
                shutil.rmtree(leftover)
            unfinished.mkdir(parents=True)
        accelerator.wait_for_everyone()
        # safetensors would leave out tied weights, and say so each time
        accelerator.save_state(str(unfinished), safe_serialization=False)
        accelerator.save(vars(self.state), unfinished / "loop.pt")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            for path in [*unfinished.rglob("*"), unfinished]:
                _flush(path)
            shutil.rmtree(finished, ignore_errors=True)
            unfinished.rename(finished)
            _flush(self.folder)
            for old in checkpoints(self.folder)[_KEPT:]:
                shutil.rmtree(old)
        accelerator.wait_for_everyone()

    def resume(self) -> None:
        """Continue from the newest checkpoint that can be read, if there are any."""
        found = checkpoints(self.folder)
        for checkpoint in found:
            try:
                self._load(checkpoint)
            except Exception as error:
                if self.accelerator.num_processes > 1:
                    # other processes may have read it: all continue from the same step
                    raise ValueError(f"{checkpoint} cannot be read, delete it: {error}") from error
                warnings.warn(f"{checkpoint} cannot be read and is skipped: {error}", stacklevel=2)
            else:
                # the end of a run does not show where it began
                step = self.state.step
                self.accelerator.print(f"{self.run}: resumed after step {step}", flush=True)
                return
        if found:
            raise ValueError(f"no checkpoint in {self.folder} can be read; delete it")
        self.accelerator.print(f"{self.run}: no checkpoint, begins with step 1", flush=True)

    def _load(self, checkpoint: Path) -> None:
        own = torch.load(checkpoint / "loop.pt", map_location="cpu", weights_only=True)
        # load_state ignores random states that it cannot read; here a damaged file raises
        load(checkpoint / f"random_states_{self.accelerator.process_index}.pkl")
        self.accelerator.load_state(str(checkpoint))
        vars(self.state).update(own)
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                # accelerate loads it to the CPU; a CUDA graph reads it from the device
                group["lr"] = group["lr"].to(self.accelerator.device)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
