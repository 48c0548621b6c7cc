"""Check that plugged filters are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gfsa.filters import GraphFilter


class FilterNotCalledError(RuntimeError):
    """A layer ran, or the block around it did, but the filter plugged into it did not."""

    names: tuple[str, ...] = ()
    """The layers whose filters were not called."""


@dataclass(eq=False)
class CallCheck:
    """Whether the filter of one layer is called; its hooks are removed once it was.

    A layer whose forward ends without a call of its filter raises. So does, in evaluation, a block
    that ends without having run its layer: in training it may skip it on purpose (stochastic
    depth). A block that does not run is not checked: a vision tower needs images.
    """

    name: str
    called: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> CallCheck:
        # a filter that is copied alone takes the place of the original in its model (peft)
        if isinstance(next(iter(memo.values()), None), GraphFilter):
            return self
        return memo.setdefault(id(self), CallCheck(self.name, self.called))

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


@dataclass(eq=False)
class _CallHook:
    """A hook after the forward of a filter, its layer or the block around that."""

    check: CallCheck
    on: Literal["filter", "layer", "block"]

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


def watch_forwards(model: nn.Module, plugged: Mapping[str, tuple[nn.Module, GraphFilter]]) -> None:
    """Check that forwards call each of these filters once."""
    for name, (module, filter) in plugged.items():
        check = CallCheck(name)
        filter.register_forward_hook(_CallHook(check, "filter"))
        module.register_forward_hook(_CallHook(check, "layer"))
        # the block is the nearest module around the layer that has a forward
        for block in islice(modules_around(model, [name]), 1):
            block.register_forward_hook(_CallHook(check, "block"))


def modules_around(model: nn.Module, names: Sequence[str]) -> Iterator[nn.Module]:
    """The modules with a forward that contain these layers, innermost first."""
    path = names[0]
    while path:
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
        contains = not path or all(name.startswith(f"{path}.") for name in names)
        # an nn.ModuleList is not called, a subclass of it may be
        has_forward = "forward" in vars(module) or type(module).forward is not nn.Module.forward
        if contains and has_forward:
            yield module


def compiled_parts(model: nn.Module) -> list[str]:
    """The names of modules that were passed to torch.compile, or whose forward was."""
    return [
        name
        for name, m in model.named_modules()
        if hasattr(m, "_orig_mod")
        or m._compiled_call_impl is not None
        or hasattr(m.forward, "_torchdynamo_orig_callable")
    ]
