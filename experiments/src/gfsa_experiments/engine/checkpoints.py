"""Checkpoints that survive ``kill -9`` at any moment.

A checkpoint is a folder that is written under another name, flushed to the disk and then renamed:
whatever carries the name ``step-…`` is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

_KEPT = 2
_STATE = "loop.json"


def write_checkpoint(
    folder: Path,
    step: int,
    state: dict[str, Any],
    save: Callable[[Path], None],
    accelerator: Accelerator,
) -> None:
    """Keep ``state`` and whatever ``save`` writes into a folder; older checkpoints go.

    Args:
        folder: where checkpoints lie.
        step: optimiser steps done.
        state: where the loop is, as plain data.
        save: writes everything else into the folder it is given, in every process.
        accelerator: the processes, which all call this.
    """
    unfinished, finished = folder / f".writing-{step}", folder / f"step-{step:09d}"
    if accelerator.is_main_process:
        for left in folder.glob(".writing-*"):
            shutil.rmtree(left)
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
        for old in _all(folder)[:-_KEPT]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, the newest first."""
    return _all(folder)[::-1]


def read_state(checkpoint: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((checkpoint / _STATE).read_text())
    except ValueError as error:
        raise ValueError(f"{checkpoint / _STATE} is damaged: {error}") from error
    return state


def _all(folder: Path) -> list[Path]:
    # one that was being deleted when the machine died has no state any more, perhaps
    return sorted(p for p in folder.glob("step-*") if (p / _STATE).exists())


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
