"""Log cheap metrics while a model trains: every N steps, measured in the training forward."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.lens import measure
from gfsa.lens.watch import Layer, Watch, attention_modules, axes_in_doubt
from gfsa.plugs.checks.called import compiled_parts
from gfsa.plugs.sites import filters_of

Log = Callable[[dict[str, float], int], None]


class Monitor:
    """Logs similarity, residual and norm after each block, and the filters' coefficients.

    .. code-block:: python

        monitor = Monitor(model, tensorboard("runs/first"), every=100)
        for step, batch in enumerate(loader):
            monitor.before_step(step)
            loss = model(**batch).loss
            ...
            monitor.after_step(step)

    The model has hooks only between the two calls of a measured step, so all other steps cost
    nothing. No forward is added, and nothing is copied from the device before :meth:`after_step`.
    Padding does not count, and a layer whose axes are in doubt is left out, with a warning.
    The model need not be called itself: where a training step calls a part of it (``self.net(x)``
    in a ``LightningModule``), the outermost part that runs counts as the model.

    Args:
        model: any model that :func:`gfsa.plug` knows, plugged or not.
        log: called with the numbers by name, and the step; see :func:`tensorboard`.
        every: measure the steps 0, ``every``, 2·``every``, …
        prefix: of the names: ``lens/cosine/03`` and so on.
    """

    def __init__(self, model: nn.Module, log: Log, every: int = 100, prefix: str = "lens") -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a number of steps, at least 1, got {every!r}")
        self.model = getattr(model, "_orig_mod", model)
        self.compiled = self.model is not model
        self.log = log
        self.every = every
        self.prefix = prefix
        self._attention = attention_modules(self.model)
        self._watch = Watch(self.model, self._attention, self._measure)
        # layers whose tokens were left out in this step, and those that were warned of
        self._left_out: set[str] = set()
        self._warned: set[str] = set()
        # what was measured, at which depth, and a number for each sample
        self._found: list[tuple[str, int, Tensor]] = []

    def before_step(self, step: int) -> None:
        """Call before the forward of training step ``step``."""
        # of a step that did not get to its end: hooks of both would count every block twice
        self.stop()
        if step % self.every == 0:
            self._found.clear()
            self._left_out = set()
            self._watch.start()

    def after_step(self, step: int) -> None:
        """Call after the step; after the optimiser's step to log the updated filters."""
        if not self._watch.stop():
            return
        values = self._means()
        if not values and not self._left_out:
            why = " inside of a call model(x), or of a call of a part that has blocks"
            if self.compiled or compiled_parts(self.model):
                why = ": torch.compile fused them; train without it to measure them"
            warnings.warn(f"no block of the model ran in step {step}{why}", stacklevel=2)
        unknown = sorted(self._left_out - self._warned)
        if unknown:
            self._warned |= self._left_out
            warnings.warn(axes_in_doubt(unknown), stacklevel=2)
        self.log({**values, **self._filters()}, step)

    def stop(self) -> None:
        """Remove the hooks."""
        self._watch.stop()

    def _measure(self, layer: Layer) -> None:
        """Measure the tokens that leave a layer."""
        tokens = layer.tokens
        if tokens is None:
            self._left_out.add(layer.name)
            return
        valid = layer.mask(tokens.shape[:2], tokens.device)
        for what, function in measure.CHEAP.items():
            self._found.append((what, layer.depth, function(tokens, valid)))

    def _means(self) -> dict[str, float]:
        """What was measured in a step, by name, each the mean over samples."""
        parts = defaultdict(list)
        # named here, because the compiler follows hooks of what it compiles, but not such formats
        for what, depth, numbers in self._found:
            parts[f"{self.prefix}/{what}/{depth:02d}"].append(numbers)
        return {name: float(torch.cat(numbers).nanmean()) for name, numbers in parts.items()}

    def _filters(self) -> dict[str, float]:
        """The mean coefficients, share and r of each layer, counted over all attention layers."""
        depth = {name: number for number, name in enumerate(self._attention, start=1)}
        values = {}
        for name, filter in filters_of(self.model).items():
            if not filter.is_polynomial:
                continue
            means = filter.coefficients().detach().mean(0)
            terms = {f"c{power}": mean for power, mean in enumerate(means)}
            terms |= {"share": filter.share(), "r": filter.depth()}
            for what, term in terms.items():
                if term is not None:
                    values[f"{self.prefix}/{what}/{depth[name]:02d}"] = float(term.detach().mean())
        return values


def tensorboard(folder: str | Path) -> Log:
    """A log for TensorBoard: ``tensorboard --logdir folder``."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError("TensorBoard is not installed: pip install tensorboard") from None
    writer = SummaryWriter(str(folder))

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


class StepCallback:
    """What the callbacks of training libraries share: a monitor, and where it logs to."""

    def __init__(
        self, every: int = 100, log_dir: str | Path | None = None, log: Log | None = None
    ) -> None:
        super().__init__()
        self.every = every
        self.log_dir = log_dir
        # not self.log: Lightning gives every callback a log of its own
        self._log = log
        self.monitor: Monitor | None = None

    def begin(self, model: nn.Module, folder: str | Path) -> None:
        """Call in the process that logs, with the trainer's folder."""
        log = self._log or tensorboard(self.log_dir or Path(folder) / "lens")
        self.monitor = Monitor(model, log, self.every)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self.monitor.stop()
