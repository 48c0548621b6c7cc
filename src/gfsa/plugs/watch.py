"""A filter that is plugged but never called is an error, not a no-op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gfsa.filters import GraphFilter


class FilterNotCalledError(RuntimeError):
    """A model ran, but a filter plugged into it did not."""


class Watch:
    """Looks at the first forward of a plugged model and then goes away.

    A layer that training skipped at random (layer drop) is waited for; a layer that ran without
    its filter, or that an evaluation skipped, is an error that names it.
    """

    def __init__(
        self, model: nn.Module, plugged: Mapping[str, tuple[nn.Module, GraphFilter]]
    ) -> None:
        self.waiting = dict(plugged)
        self.ran: set[str] = set()
        self.handles: list[RemovableHandle] = [model.register_forward_hook(self._check)]
        for name, (module, made) in plugged.items():
            self.handles.append(made.register_forward_hook(_Note(self, name, called=True)))
            self.handles.append(module.register_forward_pre_hook(_Note(self, name, called=False)))

    def _check(self, model: nn.Module, args: Any, output: Any) -> None:
        # a compiled graph is traced, not run: what it leaves out cannot be seen from in here
        if torch.compiler.is_compiling():
            return
        if _has_compiled_parts(model):
            self.remove()
            return
        missing = [n for n in self.waiting if n in self.ran or not model.training]
        if missing:
            self.remove()
            raise FilterNotCalledError(
                f"the model ran without calling the filter of {', '.join(missing)}: its attention "
                "took a path that gfsa does not see. gfsa.unplug(model), or leave these layers "
                "out with plug(..., layers=...)"
            )
        self.ran.clear()
        if not self.waiting:
            self.remove()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


class _Note:
    """A hook that writes down that a layer ran, or that its filter was called."""

    def __init__(self, watch: Watch, name: str, called: bool) -> None:
        self.watch = watch
        self.name = name
        self.called = called

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.called:
            self.watch.waiting.pop(self.name, None)
        else:
            self.watch.ran.add(self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Note:
        # a copy of the model has a watch of its own; a copy of a filter that takes the filter's
        # place (peft) tells the watch of the model that it is in
        return _Note(memo.get(id(self.watch), self.watch), self.name, self.called)


def _has_compiled_parts(model: nn.Module) -> bool:
    """Whether torch.compile was given a module of the model, or the forward of one."""
    return any(
        hasattr(m, "_orig_mod")
        or m._compiled_call_impl is not None
        or hasattr(m.forward, "_torchdynamo_orig_callable")
        for m in model.modules()
    )


def watch_first_forward(
    model: nn.Module, plugged: Mapping[str, tuple[nn.Module, GraphFilter]]
) -> None:
    """Check at the end of the model's next forward that every filter was called."""
    stop_watching(model)
    model.__dict__["_gfsa_watch"] = Watch(model, plugged)


def stop_watching(model: nn.Module) -> None:
    """Forget a check that has not happened yet."""
    watch = model.__dict__.pop("_gfsa_watch", None)
    if watch is not None:
        watch.remove()
