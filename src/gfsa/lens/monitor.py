"""Log cheap metrics while a model trains: every N steps, measured in the training forward."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gfsa.lens import measure
from gfsa.lens.record import attention_modules
from gfsa.lens.tokens import (
    Attended,
    AxesInDoubtError,
    Calls,
    Padding,
    TokenReader,
    attended_by_input,
    attended_by_values,
    axes_in_doubt,
    blocks_around,
    containers_around,
    first_tensor,
    is_inside,
    padding_of,
)
from gfsa.plugs.checks.called import compiled_parts
from gfsa.plugs.sites import filters_of

Log = Callable[[dict[str, float], int], None]


@dataclass
class _Layer:
    """One run of an attention layer."""

    name: str
    depth: int
    """Its number among the layers of the model, from 1."""
    attended: Attended | None
    """None if it cannot be told what the attention attends to."""
    padding: Padding
    tokens: Tensor | None = None
    """What leaves the outermost block around it that has ended, ``(B, N, D)``."""


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
        self._blocks = blocks_around(self.model, self._attention)
        self._containers = containers_around(self._blocks)
        self._reader = TokenReader()
        self._calls = Calls(self.model, self._blocks)
        self._handles: list[RemovableHandle] = []
        # the name of the outermost module that runs now, and of those that ran in this step
        self._running: str | None = None
        self._ran: set[str] = set()
        # what the filter of the attention that runs now was called with: tokens and their masks
        self._filtered: tuple[Attended, Padding] | None = None
        self._last: _Layer | None = None
        self._depth = 0
        # layers whose tokens were left out in this step, and those that were warned of
        self._left_out: set[str] = set()
        self._warned: set[str] = set()
        # what was measured, at which depth, and a number for each sample
        self._found: list[tuple[str, int, Tensor]] = []

    def before_step(self, step: int) -> None:
        """Call before the forward of training step ``step``."""
        # of a step that did not get to its end: hooks of both would count every block twice
        self.stop()
        if step % self.every:
            return
        self._found.clear()
        self._running, self._ran = None, set()
        self._filtered, self._last = None, None
        self._left_out = set()
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
                hook = self._block(name)
                self._handles.append(modules[block].register_forward_hook(hook, with_kwargs=True))
        for name, filter in filters_of(self.model).items():
            self._handles.append(filter.register_forward_hook(self._filter(name)))
        # after the others, since these forget a call when it ends
        self._handles += self._calls.watch()

    def after_step(self, step: int) -> None:
        """Call after the step; after the optimiser's step to log the updated filters."""
        if not self._handles:
            return
        self.stop()
        values = self._means()
        if not values and not self._left_out:
            compiled = self.compiled or compiled_parts(self.model)
            why = (
                ": torch.compile fused them; train without it to measure them"
                if compiled
                else " inside of a call model(x), or of a call of a part that has blocks"
            )
            warnings.warn(f"no block of the model ran in step {step}{why}", stacklevel=2)
        unknown = sorted(self._left_out - self._warned)
        if unknown:
            self._warned |= self._left_out
            warnings.warn(axes_in_doubt(unknown), stacklevel=2)
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
            self._running = name
            self._last = None
            self._depth = self._layers_before(name)
            self._ran.add(name)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if self._running != name:
                return
            self._flush()
            self._running = None

        return begin, end

    def _layers_before(self, container: str) -> int:
        """How many attention layers the model has before the first one inside of ``container``."""
        inside = [name == container or is_inside(name, container) for name in self._attention]
        return inside.index(True) if True in inside else 0

    def _filter(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """The hook on a filter, whose arguments show the tokens and the masks of the layer."""

        def hook(filter: nn.Module, args: Any, output: Any) -> None:
            if self._running is None or args[1].is_nested:
                return
            operator, v = args[0].whole(), args[1].detach()
            padding = padding_of(self._calls.mask_of(name), operator, v)
            self._filtered = attended_by_values(self._attention[name], v), padding

        return hook

    def _block(self, name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        """The hook after a block around the attention ``name``, or after the attention itself."""

        @torch.no_grad()
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if self._running is None:
                return
            if self._last is None or self._last.name != name or module is self._attention[name]:
                self._flush()
                self._last = self._begin_layer(name, module, args, kwargs)
            # blocks end from the inside out, so the outermost that returns tokens is kept
            layer, found = self._last, first_tensor(output)
            if layer.attended is None or found is None:
                return
            entered = first_tensor((args, kwargs))
            try:
                tokens = self._reader.tokens(found.detach(), layer.attended, module, entered)
            except AxesInDoubtError:
                layer.tokens = None
                return
            # samples of several lengths in one list: to take them apart is to read their lengths
            if tokens is not None or found.dim() == 2:
                layer.tokens = tokens

        return hook

    def _begin_layer(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> _Layer:
        """The layer whose innermost ``module`` has ended."""
        self._depth += 1
        filtered, self._filtered = self._filtered, None
        if filtered is not None:
            return _Layer(name, self._depth, *filtered)
        padding = Padding(stated=[self._calls.mask_of(name)])
        around = self._calls.matrices_around(name)
        try:
            attended = attended_by_input(self._attention[name], module, args, kwargs, around)
        except AxesInDoubtError:
            attended = None
        return _Layer(name, self._depth, attended, padding)

    @torch.no_grad()
    def _flush(self) -> None:
        """Measure the tokens of the last layer."""
        layer, self._last = self._last, None
        if layer is None:
            return
        tokens = layer.tokens
        if tokens is None:
            self._left_out.add(layer.name)
            return
        valid = layer.padding.of(tokens.shape[:2], tokens.device)
        for what, function in _CHEAP.items():
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
        filters = {n: f for n, f in filters_of(self.model).items() if f.is_polynomial}
        for name, filter in filters.items():
            for power, value in enumerate(filter.coefficients().detach().mean(0).tolist()):
                values[f"{self.prefix}/c{power}/{depth[name]:02d}"] = value
            for what, numbers in (("share", filter.share()), ("r", filter.depth())):
                if numbers is not None:
                    values[f"{self.prefix}/{what}/{depth[name]:02d}"] = float(numbers.mean())
        return values


_CHEAP = {
    "cosine": measure.cosine_similarity,
    "residual": measure.rank_one_residual,
    "norm": measure.token_norm,
}


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
