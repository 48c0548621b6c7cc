"""The lens in Lightning's ``Trainer``."""

from __future__ import annotations

import importlib
from typing import Any

from gfsa.lens.monitor import StepCallback


def _callback_class() -> type:
    """Lightning's base class under either of its two names; without Lightning, ``object``."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found: type = importlib.import_module(name).Callback
        except ImportError:
            continue
        return found
    return object


class LensCallback(StepCallback, _callback_class()):  # type: ignore[misc]
    """Logs similarity, residual, norm and coefficients every N steps to TensorBoard.

    .. code-block:: python

        Trainer(callbacks=[LensCallback(every=100)])

    A step here is an optimiser's: with gradient accumulation its batches are averaged.

    Args:
        every: steps between two measurements; the first step is measured, too.
        log_dir: the folder for TensorBoard; default: ``lens`` in the trainer's root folder.
        log: another log function, called with the numbers by name and the step.
    """

    # the optimiser's step that is being measured
    _step: int | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.begin(pl_module, trainer.default_root_dir)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if self.monitor is not None and self._step is None:
            self._step = trainer.global_step
            self.monitor.before_step(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        # the step is over when the trainer has counted it
        step = self._step
        if self.monitor is not None and step is not None and step != trainer.global_step:
            self.monitor.after_step(step)
            self._step = None
