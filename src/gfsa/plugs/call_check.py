"""A filter that is plugged but never called is an error, not a no-op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gfsa.filters import GraphFilter

Event = Literal["reached", "ran", "called"]


class FilterNotCalledError(RuntimeError):
    """A model ran, but a filter plugged into it did not."""


class Watch:
    """Looks at each plugged layer until its filter has been called once, and then goes away.

    A layer that ran without its filter is an error that names it, at the end of the forward that
    did so. So is, in evaluation, a layer that was passed by although the block it sits in ran. A
    layer whose block did not run is waited for: training may drop layers, a text alone needs no
    vision tower.
    """

    def __init__(
        self, model: nn.Module, plugged: Mapping[str, tuple[nn.Module, GraphFilter]]
    ) -> None:
        self.events: dict[str, set[Event]] = {name: set() for name in plugged}
        self.handles: dict[str, list[RemovableHandle]] = {}
        self.last = model.register_forward_hook(self._check)
        for name, (module, made) in plugged.items():
            self.handles[name] = [
                made.register_forward_hook(_Note(self, name, "called")),
                module.register_forward_pre_hook(_Note(self, name, "ran")),
                _owner(model, name).register_forward_pre_hook(_Note(self, name, "reached")),
            ]

    def note(self, name: str, event: Event) -> None:
        if event == "called":
            self.forget(name)
        else:
            # another thread may have seen the filter called a moment ago
            self.events.get(name, set()).add(event)

    def forget(self, name: str) -> None:
        """Stop looking at a layer: its filter was called, or taken out."""
        self.events.pop(name, None)
        for handle in self.handles.pop(name, ()):
            handle.remove()
        if not self.events:
            self.last.remove()

    def _check(self, model: nn.Module, args: Any, output: Any) -> None:
        # a compiled graph is traced, not run: what it leaves out cannot be seen from in here
        if torch.compiler.is_compiling():
            return
        if compiled := _compiled_parts(model):
            self._leave_to_the_compiler(compiled)
            return
        telling = "ran" if model.training else "reached"
        missing = [
            name
            for name, events in list(self.events.items())
            if "ran" in events or telling in events
        ]
        for events in list(self.events.values()):
            events.clear()
        if missing:
            raise FilterNotCalledError(
                f"the model ran without calling the filter of {', '.join(missing)}: its attention "
                "took a path that gfsa does not see. gfsa.unplug(model), or leave these layers "
                "out with plug(..., layers=...)"
            )

    def _leave_to_the_compiler(self, compiled: list[str]) -> None:
        """Look no further; hooks in compiled code are nothing there, and stay.

        Without them it would be other code, to be compiled once more in the next forward.
        """
        self.last.remove()
        for name in list(self.events):
            if any(part == "" or f"{name}.".startswith(f"{part}.") for part in compiled):
                del self.events[name]
            else:
                self.forget(name)


class _Note:
    """A hook that tells a watch that something happened to a layer."""

    def __init__(self, watch: Watch | None, name: str, event: Event) -> None:
        self.watch = watch
        self.name = name
        self.event = event

    def __call__(self, *args: Any) -> None:
        if self.watch is not None and not torch.compiler.is_compiling():
            self.watch.note(self.name, self.event)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Note:
        # a copy of the model has a watch of its own; a copy of a filter that takes the filter's
        # place (peft) tells the watch of the model that it is in
        if self.watch is None or self.name not in self.watch.events:
            # it is there for compiled code alone, and what a copy does is nobody's business
            return _Note(None, self.name, self.event)
        return _Note(memo.get(id(self.watch), self.watch), self.name, self.event)


def watch_first_forward(
    model: nn.Module, plugged: Mapping[str, tuple[nn.Module, GraphFilter]]
) -> None:
    """Check at the end of the model's next forwards that every filter is called."""
    if plugged:
        Watch(model, plugged)


def stop_watching(made: GraphFilter) -> None:
    """Forget the check of one filter that has not been called yet."""
    for hook in list(made._forward_hooks.values()):
        if isinstance(hook, _Note) and hook.watch is not None:
            hook.watch.forget(hook.name)


def _owner(model: nn.Module, name: str) -> nn.Module:
    """The block that a layer sits in: the nearest module around it that is itself called."""
    while name:
        name = name.rpartition(".")[0]
        owner = model.get_submodule(name)
        if not isinstance(owner, nn.ModuleList | nn.ModuleDict):
            return owner
    return model


def _compiled_parts(model: nn.Module) -> list[str]:
    """The modules that torch.compile was given, or the forward of which it was given."""
    return [
        name
        for name, m in model.named_modules()
        if hasattr(m, "_orig_mod")
        or m._compiled_call_impl is not None
        or hasattr(m.forward, "_torchdynamo_orig_callable")
    ]
