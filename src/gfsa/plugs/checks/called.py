"""Check that plugged filters are called, and that training moves them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gfsa.filters import GraphFilter
from gfsa.plugs.checks.proof import leaves_of
from gfsa.plugs.distributed import is_partitioned


class FilterNotCalledError(RuntimeError):
    """A layer ran, or the block around it did, but the filter plugged into it did not."""

    names: tuple[str, ...] = ()
    """The layers whose filters were not called."""


class CallCheck:
    """Whether the filter of one layer is called; its hooks are removed once it was.

    A layer whose forward ends without a call of its filter raises an error that names it. So does,
    in evaluation, a block that ends without having run its layer: in training it may skip it on
    purpose (stochastic depth). A block that does not run is not checked: an input without images
    does not reach a vision tower.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.called = False

    def __deepcopy__(self, memo: dict[int, Any]) -> CallCheck:
        # a filter that is copied alone takes the place of the original in its model (peft)
        if isinstance(next(iter(memo.values()), None), GraphFilter):
            return self
        copied = CallCheck(self.name)
        copied.called = self.called
        memo[id(self)] = copied
        return copied

    def conclude(self, module: nn.Module) -> None:
        """Raise if a layer or a block has ended without a call of the filter inside."""
        # the caller may have replaced the layer since, or the filter alone; hooks inside of
        # compiled modules do nothing, and removing them would have the module compiled again
        if not self.called and self in checks_of(module):
            if compiled_parts(module):
                return
            error = FilterNotCalledError(
                f"the model ran without calling the filter of {self.name}: its attention took a "
                "code path that bypasses the filter. gfsa.unplug(model), then "
                "plug(..., inputs=batch), which leaves out such layers, or plug(..., layers=...) "
                "without them"
            )
            error.names = (self.name,)
            raise error
        self.called = True
        remove_checks(module)


class _CallHook:
    """A hook after the forward of a filter, its layer or the block around that."""

    def __init__(self, check: CallCheck, on: Literal["filter", "layer", "block"]) -> None:
        self.check = check
        self.on = on

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        # while a graph is traced nothing runs, so nothing can be concluded
        traced = isinstance(next(iter(tree_leaves(output)), None), torch.fx.Proxy)
        if torch.compiler.is_compiling() or traced:
            return
        if self.on == "filter":
            self.check.called = True
        elif self.on == "layer" or self.check.called or not module.training:
            self.check.conclude(module)


def checks_of(model: nn.Module) -> list[CallCheck]:
    """The checks of filters in this model that still have hooks on them."""
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    return [h.check for h in hooks if isinstance(h, _CallHook) and h.on == "filter"]


def remove_checks(model: nn.Module) -> None:
    """Remove the hooks of checks that have ended, or whose filter is no longer in this model."""
    awaited = checks_of(model)
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, _CallHook) and (hook.check.called or hook.check not in awaited):
                del module._forward_hooks[key]


class TrainingCheck:
    """A hook of a plugged model that warns once if training moves other weights but no filter.

    That is what an optimizer does that was built before the filters were plugged. Weights are
    compared by their version counters, which is free; filters also by value, but only before the
    warning. The check ends when a filter has moved.
    """

    def __init__(self) -> None:
        self.forwards = 0
        self.next_look = _FORWARDS
        # by name, at the first training forward
        self.versions: dict[str, int] = {}
        self.start: dict[str, Tensor] = {}

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        self.forwards += 1
        if self.forwards == 1:
            self._begin(model)
        elif self.forwards == self.next_look:
            # while gradients accumulate, nothing moves
            self.next_look *= 2
            self._look(model, output)

    def _begin(self, model: nn.Module) -> None:
        weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if any(is_partitioned(p) or p.is_meta for p in weights.values()):
            # such parameters are replaced between forwards
            weights = {}
        self.versions = {name: p._version for name, p in weights.items()}
        for name, filter in model.named_modules():
            if isinstance(filter, GraphFilter):
                own = ((f"{name}.{n}", p) for n, p in filter.named_parameters())
                self.start |= {n: p.detach().clone() for n, p in own if n in weights}
        if not self.start:
            self._end(model)

    def _look(self, model: nn.Module, output: Any) -> None:
        weights = dict(model.named_parameters())
        moved = {n for n, v in self.versions.items() if n in weights and weights[n]._version != v}
        filters = {n: weights[n] for n in self.start if n in weights}
        if moved & filters.keys() or not filters:
            self._end(model)
        elif moved and (
            any(p.grad is not None for p in filters.values()) or _leads_to(filters.values(), output)
        ):
            self._end(model)
            if all(torch.equal(p, self.start[n].to(p.device)) for n, p in filters.items()):
                warnings.warn(
                    f"in {self.forwards} training forwards of {type(model).__name__} other weights "
                    "have changed, but no filter has, although filters got gradients: the "
                    "optimizer does not have their parameters. Build it after gfsa.plug, with "
                    "gfsa.parameter_groups(model, ...) or model.parameters(); to keep the filters "
                    "as they are, call requires_grad_(False) on them",
                    stacklevel=2,
                )

    def _end(self, model: nn.Module) -> None:
        for key, hook in list(model._forward_hooks.items()):
            if hook is self:
                del model._forward_hooks[key]


def _leads_to(weights: Iterable[Tensor], output: Any) -> bool:
    """Whether gradients of an output reach one of these weights."""
    tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
    reached: set[int] = set().union(*map(leaves_of, tensors))
    return any(id(weight) in reached for weight in weights)


# how many training forwards go by before filters are looked at
_FORWARDS = 10


def watch_forwards(model: nn.Module, plugged: Mapping[str, tuple[nn.Module, GraphFilter]]) -> None:
    """Check that forwards call each of these filters once, and that training moves them."""
    for name, (module, filter) in plugged.items():
        check = CallCheck(name)
        filter.register_forward_hook(_CallHook(check, "filter"))
        module.register_forward_hook(_CallHook(check, "layer"))
        if name:
            _block_of(model, name).register_forward_hook(_CallHook(check, "block"))
    if plugged:
        stop_watching_training(model)
        model.register_forward_hook(TrainingCheck())


def stop_watching_training(module: nn.Module) -> None:
    """End the check that training moves the filters of this module."""
    for hook in list(module._forward_hooks.values()):
        if isinstance(hook, TrainingCheck):
            hook._end(module)


def stop_checking(filter: GraphFilter) -> None:
    """End the check of one filter that has not been called yet."""
    for key, hook in list(filter._forward_hooks.items()):
        if isinstance(hook, _CallHook):
            del filter._forward_hooks[key]


def _block_of(model: nn.Module, name: str) -> nn.Module:
    """The block of a layer: the nearest module around it that has a forward."""
    while name:
        name = name.rpartition(".")[0]
        block = model.get_submodule(name)
        if not isinstance(block, nn.ModuleList | nn.ModuleDict):
            return block
    return model


def compiled_parts(model: nn.Module) -> list[str]:
    """The names of modules that were passed to torch.compile, or whose forward was."""
    return [
        name
        for name, m in model.named_modules()
        if hasattr(m, "_orig_mod")
        or m._compiled_call_impl is not None
        or hasattr(m.forward, "_torchdynamo_orig_callable")
    ]
