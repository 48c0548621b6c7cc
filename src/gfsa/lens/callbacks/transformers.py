"""The lens in transformers' ``Trainer``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from gfsa.lens.monitor import StepCallback


class LensCallback(StepCallback, TrainerCallback):
    """Logs similarity, residual, norm and coefficients every N steps to TensorBoard.

    .. code-block:: python

        Trainer(model, args, train_dataset=data, callbacks=[LensCallback(every=100)])

    Args:
        every: steps between two measurements; the first step is measured, too.
        log_dir: the folder for TensorBoard; default: ``lens`` in the trainer's output folder.
        log: another log function, called with the numbers by name and the step.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.begin(kwargs["model"], args.output_dir)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self.monitor.before_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            # the trainer has counted the step by now
            self.monitor.after_step(state.global_step - 1)
