"""Log cheap metrics while a model trains: every N steps, measured in the training forward."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gfsa.lens import metrics
from gfsa.lens.sites import attention_modules, blocks_around, containers_around, is_inside
from gfsa.lens.tokens import as_tokens, first_tensor, fits, valid_from_batch
from gfsa.plugs.call_check import compiled_parts
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
        self._blocks = blocks_around(self.model, self._attention)
        self._containers = containers_around(self._blocks)
        self._handles: list[RemovableHandle] = []
        # the name of the outermost module that runs now, and of those that ran in this step
        self._running: str | None = None
        self._ran: set[str] = set()
        self._batch: dict[str, Any] = {}
        self._last: tuple[str, Tensor] | None = None
        self._depth = 0
        self._found: dict[str, list[Tensor]] = defaultdict(list)

    def before_step(self, step: int) -> None:
        """Call before the forward of training step ``step``."""
        # of a step that did not get to its end: hooks of both would count every block twice
        self.stop()
        if step % self.every:
            return
        self._found.clear()
        self._running, self._ran = None, set()
        modules = dict(self.model.named_modules())
        for name in self._containers:
            begin, end = self._container(name)
            module = modules[name]
            self._handles += [
                module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
                module.register_forward_hook(end),
            ]
        for name, blocks in self._blocks.items():
            for block in blocks:
                self._handles.append(modules[block].register_forward_hook(self._block(name)))

    def after_step(self, step: int) -> None:
        """Call after the step; after the optimiser's step to log the updated filters."""
        if not self._handles:
            return
        self.stop()
        values = {name: float(torch.cat(parts).nanmean()) for name, parts in self._found.items()}
        if not values:
            compiled = self.compiled or compiled_parts(self.model)
            why = (
                ": torch.compile fused them; train without it to measure them"
                if compiled
                else " inside of a call model(x), or of a call of a part that has blocks"
            )
            warnings.warn(f"no block of the model ran in step {step}{why}", stacklevel=2)
        self.log({**values, **self._filters()}, step)

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _container(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """The hooks before and after the forward of a module that has several blocks."""

        def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if self._running is not None and self._running != name:
                return
            # what is checkpointed runs again in the backward, when the forward around it is over
            if any(is_inside(name, container) for container in self._ran):
                return
            self._running, self._batch = name, kwargs
            self._last = None
            self._depth = self._layers_before(name)
            self._ran.add(name)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if self._running != name:
                return
            self._flush()
            self._running, self._batch = None, {}

        return begin, end

    def _layers_before(self, container: str) -> int:
        """How many attention layers the model has before the first one inside of ``container``."""
        inside = [name == container or is_inside(name, container) for name in self._attention]
        return inside.index(True) if True in inside else 0

    def _block(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found = first_tensor(output) if self._running is not None else None
            if found is None:
                return
            # blocks end from the inside out, so the outermost around an attention is kept
            if self._last is not None and self._starts_again(name, module):
                self._flush()
            self._last = (name, found.detach())

        return hook

    def _starts_again(self, name: str, module: nn.Module) -> bool:
        """Whether the module that ends now belongs to another layer than the last one."""
        assert self._last is not None
        return self._last[0] != name or module is self._attention[name]

    @torch.no_grad()
    def _flush(self) -> None:
        if self._last is None:
            return
        name, x = self._last
        self._last = None
        valid = valid_from_batch(self._batch, name)
        tokens = as_tokens(x, None, self._attention[name], valid)
        if tokens is None:
            return
        self._depth += 1
        valid = fits(valid, tokens)
        for what, measure in _CHEAP.items():
            key = f"{self.prefix}/{what}/{self._depth:02d}"
            self._found[key].append(measure(tokens, valid))

    def _filters(self) -> dict[str, float]:
        """The mean coefficients of each layer, counted over all attention layers."""
        depth = {name: number for number, name in enumerate(self._attention, start=1)}
        values = {}
        filters = {n: f for n, f in filters_of(self.model).items() if f.is_polynomial}
        for name, filter in filters.items():
            for power, value in enumerate(filter.coefficients().detach().mean(0).tolist()):
                values[f"{self.prefix}/c{power}/{depth[name]:02d}"] = value
        return values


_CHEAP = {
    "cosine": metrics.cosine_similarity,
    "residual": metrics.rank_one_residual,
    "norm": metrics.token_norm,
}


def tensorboard(folder: str | Path) -> Log:
    """A log for TensorBoard: ``tensorboard --logdir folder``."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError("TensorBoard is missing: pip install 'gfsa[tensorboard]'") from None
    writer = SummaryWriter(str(folder))

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log
