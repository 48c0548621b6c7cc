"""Check that plugged filters are called, and that training moves them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gfsa.filters import GraphFilter


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
    """A hook on the gradients of filters that warns once if training moves other weights alone.

    That is what an optimizer does that was built before the filters were plugged. It has made a
    step if version counters of weights differ between two backward passes; so passes that
    accumulate gradients are not counted. Filters are also compared by value, before the warning.
    The check ends when a filter has moved. torch copies no hooks of parameters: a copy of the model
    has no check.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self)
            for parameter in _filter_parameters(model).values()
            if parameter.requires_grad and not parameter.is_meta
        ]
        # of all filters that get a gradient, the first one counts
        self.first: int | None = None
        self.steps = 0
        # by name, at the last and at the first backward pass
        self.versions: dict[str, int] = {}
        self.start: dict[str, Tensor] = {}

    def __call__(self, parameter: Tensor) -> None:
        model = self.model()
        if torch.compiler.is_compiling() or model is None:
            return
        if self.first is None:
            self.first = id(parameter)
            self.start = {n: p.detach().clone() for n, p in _filter_parameters(model).items()}
        if id(parameter) != self.first:
            return
        now = {name: p._version for name, p in model.named_parameters() if p.requires_grad}
        moved = {
            name for name, version in now.items() if self.versions.get(name, version) != version
        }
        self.versions = now
        if moved & self.start.keys():
            self.end()
        elif moved:
            self.steps += 1
            if self.steps == _STEPS:
                self.end()
                self._warn(model)

    def _warn(self, model: nn.Module) -> None:
        filters = _filter_parameters(model)
        start = {n: p.to(filters[n].device) for n, p in self.start.items() if n in filters}
        if all(torch.equal(filters[name], value) for name, value in start.items()):
            warnings.warn(
                f"in {_STEPS} training steps of {type(model).__name__} other weights have changed, "
                "but no filter has, although filters got gradients: the optimizer does not have "
                "their parameters. Build it after gfsa.plug, with gfsa.parameter_groups(model, "
                "...) or model.parameters(); to keep the filters as they are, call "
                "requires_grad_(False) on them",
                stacklevel=2,
            )

    def end(self) -> None:
        for handle in self.handles:
            handle.remove()


# how many steps an optimizer may make before it must have moved a filter
_STEPS = 10


def _filter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        f"{name}.{own}": parameter
        for name, filter in model.named_modules()
        if isinstance(filter, GraphFilter)
        for own, parameter in filter.named_parameters()
    }


def watch_forwards(model: nn.Module, plugged: Mapping[str, tuple[nn.Module, GraphFilter]]) -> None:
    """Check that forwards call each of these filters once, and that training moves them."""
    for name, (module, filter) in plugged.items():
        check = CallCheck(name)
        filter.register_forward_hook(_CallHook(check, "filter"))
        module.register_forward_hook(_CallHook(check, "layer"))
        if name:
            _block_of(model, name).register_forward_hook(_CallHook(check, "block"))
    if plugged:
        for parameter in _filter_parameters(model).values():
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                if isinstance(hook, TrainingCheck):
                    hook.end()
        TrainingCheck(model)


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
