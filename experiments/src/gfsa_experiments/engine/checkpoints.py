"""Random generators, the state of the loop, and the checkpoints that a run resumes from.

They survive ``kill -9`` at any moment: a checkpoint is a folder that is written under a temporary
name, flushed to the disk and then renamed, so whatever is called ``step-…`` is complete.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from gfsa.lens.trajectory import Trajectory
from gfsa_experiments.engine.config import TrainConfig
from gfsa_experiments.engine.measure import RunLog

if TYPE_CHECKING:
    from accelerate import Accelerator


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


def save_randomness(path: Path) -> None:
    """Save the state of every generator of this process.

    accelerate's ``save_state`` saves them too, but its ``load_state`` ignores a file that it cannot
    read, and the run would go on with other random numbers: so this state has a file of its own.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    torch.save(
        {
            "python": random.getstate(),
            "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
            "torch": torch.random.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        },
        path,
    )


def load_randomness(path: Path) -> None:
    state = torch.load(path, map_location="cpu", weights_only=True)
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.random.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


_STATE = "loop.json"


def write_checkpoint(
    folder: Path,
    step: int,
    state: dict[str, Any],
    save: Callable[[Path], None],
    accelerator: Accelerator,
    kept: int,
) -> None:
    """Write a checkpoint and delete older ones; every process calls this.

    Args:
        folder: the folder of all checkpoints.
        step: optimiser steps done.
        state: the position of the training loop, as JSON data.
        save: writes everything else into the folder it is given, in every process.
        accelerator: the processes.
        kept: how many stay, with the new one.
    """
    unfinished, finished = folder / f".writing-{step}", folder / f"step-{step:09d}"
    if accelerator.is_main_process:
        for leftover in folder.glob(".writing-*"):
            shutil.rmtree(leftover)
        unfinished.mkdir(parents=True)
    accelerator.wait_for_everyone()
    save(unfinished)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (unfinished / _STATE).write_text(json.dumps(state))
        for path in [*unfinished.rglob("*"), unfinished]:
            _flush(path)
        shutil.rmtree(finished, ignore_errors=True)
        unfinished.rename(finished)
        _flush(folder)
        for old in checkpoints(folder)[kept:]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


@contextmanager
def without_note_of_tied_weights() -> Iterator[None]:
    """Leave out accelerate's note that of tied weights one copy is saved.

    It asks the reader to check that they are loaded, with every checkpoint: the model that loads
    them has them tied already.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return "Removed shared tensor" not in record.getMessage()

    logger = logging.getLogger("accelerate.utils.other")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, the newest first."""
    # a checkpoint that was being deleted when the machine stopped may have lost its state
    return sorted((p for p in folder.glob("step-*") if (p / _STATE).exists()), reverse=True)


def newest_step(folder: Path) -> int:
    """The steps that the newest checkpoint in ``folder`` has done; 0 if there is none."""
    found = checkpoints(folder)
    return int(found[0].name.removeprefix("step-")) if found else 0


def read_state(checkpoint: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((checkpoint / _STATE).read_text())
    except ValueError as error:
        raise ValueError(f"{checkpoint / _STATE} is damaged: {error}") from error
    return state


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# checkpoints of an epoch, or of a run that is shorter, that are written at evaluations
_WITHIN_EPOCH = 10


@dataclass
class CheckpointTimes:
    """At the end of each epoch, and within it at evaluations; or every so many steps, as set.

    A run of one epoch would have nothing to resume from otherwise. At an evaluation the loss is
    read anyway, so a checkpoint there leaves the log as it is without one.
    """

    config: TrainConfig
    per_epoch: int
    """Steps of an epoch."""
    total: int
    """Steps of the run."""
    last: int
    """The step of the last checkpoint; where the run begins, if it has none."""

    def kept(self, step: int, evaluates: bool) -> int:
        """How many checkpoints are kept after one that is due now; 0 if none is due.

        Args:
            step: steps done.
            evaluates: whether ``valid`` is evaluated after this step.
        """
        if not self.config.checkpoints:
            return 0
        if step % (self.config.checkpoint_every or self.per_epoch) == 0 or step == self.total:
            # if the newest is damaged, the run goes on from the one before
            return 2
        apart = min(self.per_epoch, self.total) / _WITHIN_EPOCH
        within = evaluates and not self.config.checkpoint_every and step - self.last >= apart
        # of a large model each has gigabytes
        return 1 if within else 0


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
