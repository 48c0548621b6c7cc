"""The lens in Lightning's ``Trainer``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from gfsa.lens.monitor import Log, Monitor, tensorboard


def _callback_class() -> type:
    """Lightning's base class under either of its two names; without Lightning, ``object``."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found: type = importlib.import_module(name).Callback
        except ImportError:
            continue
        return found
    return object


class LensCallback(_callback_class()):  # type: ignore[misc]
    """Logs similarity, residual, norm and coefficients every N steps to TensorBoard.

    .. code-block:: python

        Trainer(callbacks=[LensCallback(every=100)])

    A step here is an optimiser's: with gradient accumulation its batches are averaged.

    Args:
        every: steps between two measurements; the first step is measured, too.
        log_dir: the folder for TensorBoard; default: ``lens`` in the trainer's root folder.
        log: another log function, called with the numbers by name and the step.
    """

    def __init__(
        self, every: int = 100, log_dir: str | Path | None = None, log: Log | None = None
    ) -> None:
        super().__init__()
        self.every = every
        self.log_dir = log_dir
        # not self.log: Lightning gives every callback a log of its own
        self._log = log
        self.monitor: Monitor | None = None
        self._looking: int | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        log = self._log or tensorboard(self.log_dir or Path(trainer.default_root_dir) / "lens")
        self.monitor = Monitor(pl_module, log, self.every)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.monitor is not None and self._looking is None:
            self._looking = trainer.global_step
            self.monitor.before_step(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # the step is over when the trainer has counted it
        if self.monitor is None or self._looking is None or trainer.global_step == self._looking:
            return
        self.monitor.after_step(self._looking)
        self._looking = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.monitor is not None:
            self.monitor.stop()
