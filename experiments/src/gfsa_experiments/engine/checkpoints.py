"""Checkpoints that an interrupted run resumes from.

They survive ``kill -9`` at any moment: a checkpoint is a folder that is written under a
temporary name, flushed to the disk and then renamed, so whatever is called ``step-…`` is complete.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

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
