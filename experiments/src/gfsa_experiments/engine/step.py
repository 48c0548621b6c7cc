"""One optimiser step, eager or replayed as a CUDA graph, and functions on nested batches."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn


def map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """``batch`` with ``function`` applied to everything in it that contains nothing else."""
    if isinstance(batch, dict):
        return {key: map_leaves(function, value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [map_leaves(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch)]
        changed = {name: map_leaves(function, getattr(batch, name)) for name in names}
        return dataclasses.replace(batch, **changed)
    return function(batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """``batch`` with ``function`` applied to every tensor; other values stay."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def leaves_of(batch: Any) -> list[Any]:
    """The tensors and other values of a batch, in order."""
    found: list[Any] = []
    map_leaves(found.append, batch)
    return found


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order."""
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch on ``device``, by its own ``.to`` if it has one (as graph batches do)."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def signature_of(batch: Any) -> tuple[Any, ...]:
    """The key of a batch among captured graphs: shapes, dtypes, and the ``repr`` of the rest."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves_of(batch)
    )


LossOf = Callable[[nn.Module, Any], Tensor]

# with more shapes than this, graphs do not help
_MOST_GRAPHS = 64


@dataclass(eq=False)
class EagerStep:
    """Clip the gradient of a batch, and update the parameters."""

    accelerator: Accelerator
    model: nn.Module
    optimiser: Any
    loss_of: LossOf
    clip: float

    def __call__(self, batch: Any) -> Tensor:
        """The loss of the step, on the device."""
        with self.accelerator.autocast():
            loss = self.loss_of(self.model, batch)
        self.accelerator.backward(loss)
        if self.clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return loss.detach().float()


@dataclass(eq=False)
class GraphedStep(EagerStep):
    """The same for one process, replayed from a CUDA graph.

    The first batch of a shape runs eagerly (which warms up what compiles), the second is captured,
    and from then on a step is one launch.
    """

    def __post_init__(self) -> None:
        processes, device = self.accelerator.num_processes, self.accelerator.device.type
        if device != "cuda" or processes > 1:
            raise ValueError(
                "graphs=true replays steps of one process on one GPU; "
                f"this run has {processes} on {device}"
            )
        # torch's optimiser: a capture must not run the bookkeeping of accelerate's wrapper
        self.optimiser = self.optimiser.optimizer
        self._seen: set[Any] = set()
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Any, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, batch: Any) -> Tensor:
        # values that are not tensors become constants of the graph, so they are part of its key
        shape = signature_of(batch)
        if not tensors_of(batch):
            raise ValueError(
                f"graphs=true needs batches of tensors in dicts, lists or dataclasses, "
                f"got {type(batch).__name__}"
            )
        if shape not in self._graphs:
            is_full = len(self._graphs) >= _MOST_GRAPHS
            if is_full:
                # python shows the warning of a line once
                warnings.warn(
                    f"batches have come in more than {_MOST_GRAPHS} shapes: batches of further "
                    "shapes run eagerly; pad to fewer shapes (pad_to_multiple)",
                    stacklevel=2,
                )
            if is_full or shape not in self._seen:
                self._seen.add(shape)
                return self._eagerly(batch)
            self._graphs[shape] = self._capture(batch)
        graph, inputs, loss = self._graphs[shape]
        for static, tensor in zip(tensors_of(inputs), tensors_of(batch), strict=True):
            static.copy_(tensor, non_blocking=True)
        graph.replay()
        return loss

    def _work(self, batch: Any) -> Tensor:
        with self.accelerator.autocast():
            loss = self.loss_of(self.model, batch)
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip, foreach=True)
        self.optimiser.step()
        return loss.detach().float()

    def _eagerly(self, batch: Any) -> Tensor:
        # warm-up for a capture has to run on a side stream
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._work(batch)
            self.optimiser.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _capture(self, batch: Any) -> tuple[torch.cuda.CUDAGraph, Any, Tensor]:
        inputs = map_tensors(torch.clone, batch)
        known = len(self.optimiser.state)
        graph = torch.cuda.CUDAGraph()
        # threads of data loaders may pin memory during the capture
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            loss = self._work(inputs)
        if len(self.optimiser.state) > known:
            raise RuntimeError(
                "a parameter got its first gradient while a step was captured; each replay would "
                "reset its optimiser state; run this model with graphs=false"
            )
        # the gradients are memory of the graph, which writes them at each replay
        self.optimiser.zero_grad(set_to_none=True)
        return graph, inputs, loss
