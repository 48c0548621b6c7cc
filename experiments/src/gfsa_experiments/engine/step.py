"""One training step: optimiser and learning rate, compiled models, CUDA graphs, nested batches."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from gfsa.plugs.optim import FILTERS
from gfsa_experiments.engine.config import TrainConfig


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


def build_optimiser(
    model: nn.Module, added: Sequence[nn.Parameter], config: TrainConfig, filter_lr: float | None
) -> torch.optim.Optimizer:
    """AdamW on the groups of :func:`gfsa.parameter_groups`: weights, gains and biases, filters.

    There are two exceptions. Models of timm name parameters that are not decayed, positions and
    class tokens, which go to the biases; and what baselines added goes where filters are.

    Args:
        added: parameters that a method added to the model, filters included; they are not decayed.
        filter_lr: the learning rate of ``added``; None for ``config.lr``.
    """
    rates = {
        "weights": config.lr,
        "biases": config.lr if config.gain_lr is None else config.gain_lr,
        FILTERS: config.lr if filter_lr is None else filter_lr,
    }
    found: dict[str, list[nn.Parameter]] = {name: [] for name in rates}
    is_added = {id(p) for p in added}
    not_decayed: set[str] = getattr(model, "no_weight_decay", set)()
    for name, p in model.named_parameters():
        if p.requires_grad:
            decayed = "weights" if p.dim() > 1 and name not in not_decayed else "biases"
            found[FILTERS if id(p) in is_added else decayed].append(p)
    groups: list[dict[str, Any]] = [
        {"name": name, "params": own, "lr": rates[name]} for name, own in found.items() if own
    ]
    if not groups:
        raise ValueError("there is nothing to train: every parameter of the model is frozen")
    device = groups[0]["params"][0].device
    for group in groups:
        group["weight_decay"] = config.weight_decay if group["name"] == "weights" else 0.0
        # what a schedule takes its share of; a CUDA graph reads the learning rate from the device
        group["peak"] = group["lr"]
        if config.graphs:
            group["lr"] = torch.tensor(group["peak"], device=device)
    return torch.optim.AdamW(
        groups, betas=(0.9, config.beta2), fused=device.type == "cuda", capturable=config.graphs
    )


def set_learning_rate(
    optimiser: torch.optim.Optimizer, config: TrainConfig, step: int, total: int
) -> float:
    """Set each group's learning rate for ``step`` (counted from 0); returns the first group's."""
    factor = share_of_peak(config, step, total)
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(group["peak"] * factor)
        else:
            group["lr"] = group["peak"] * factor
    return float(optimiser.param_groups[0]["peak"] * factor)


def share_of_peak(config: TrainConfig, step: int, total: int) -> float:
    """Warm-up, then decay to ``min_lr``, as a share of the learning rate."""
    warm = round(config.warmup * total)
    if step < warm:
        return (step + 1) / warm
    if config.schedule == "constant":
        return 1.0
    progress = (step - warm) / max(1, total - warm)
    falling = 1 - progress
    if config.schedule == "cosine":
        falling = (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr + (1 - config.min_lr) * falling


class WeightAverage(nn.Module):
    """The exponential moving average of a model's weights, which is evaluated instead of them.

    .. math:: \\bar w \\leftarrow d\\,\\bar w + (1-d)\\,w, \\qquad d = \\min(decay, (1+t)/(10+t))

    Because of the ramp, which torch's ``AveragedModel`` lacks, short runs forget their random
    start. Buffers are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Add the weights after ``step`` steps."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        averaged: list[Tensor] = list(self.module.parameters())
        torch._foreach_lerp_(averaged, list(model.parameters()), share)
        for average, current in zip(self.module.buffers(), model.buffers(), strict=True):
            average.copy_(current)


def compile_model(model: nn.Module, **options: Any) -> None:
    """Compile ``model`` in place, as a whole."""
    _compile([model], options)


def compile_blocks(model: nn.Module, **options: Any) -> int:
    """Compile each block of ``model``'s stacks in place, and return the number of blocks.

    Blocks of a stack share their code: the first is compiled and the others reuse it, which takes a
    fraction of the time of compiling the whole model and leaves little unfused. Blocks that differ
    in a constant (a drop-path rate that rises with depth) are compiled one by one.
    """
    blocks = [block for stack in _stacks(model) for block in stack]
    if not blocks:
        raise ValueError(
            f"compile=blocks compiles stacks of blocks of one class, and {type(model).__name__} "
            "has no such stack; use compile=model"
        )
    # above its limit the compiler runs blocks eagerly; a block may have code for training and for
    # evaluation, each for one shape and for dynamic shapes
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 4 * len(blocks))
    _compile(blocks, options)
    return len(blocks)


def forget_compiled(model: nn.Module) -> None:
    """Undo compilation in place, so that hooks inside ``model`` are called again."""
    for module in model.modules():
        module._compiled_call_impl = None


def _compile(modules: Iterable[nn.Module], options: dict[str, Any]) -> None:
    # code of earlier runs in this process counts against the limit, and sizes that differed from
    # theirs would be compiled as dynamic: each run starts from an empty cache
    torch._dynamo.reset()
    for module in modules:
        # the compiler skips frames of torch.nn's own files, and therefore silently a module of a
        # class defined there, unless a function of another file calls it
        def call(*args: Any, own: nn.Module = module, **kwargs: Any) -> Any:
            return own._call_impl(*args, **kwargs)

        module._compiled_call_impl = torch.compile(call, **options)


def _stacks(module: nn.Module) -> list[list[nn.Module]]:
    """The outermost stacks of blocks of one class that have submodules."""
    blocks = list(module.children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(blocks) > 1:
        kind = type(blocks[0])
        if all(type(b) is kind and any(b.children()) for b in blocks):
            return [blocks]
    return [stack for child in blocks for stack in _stacks(child)]
