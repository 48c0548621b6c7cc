"""Check that plugged filters are called, and that training moves them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gfsa.filters import GraphFilter
from gfsa.plugs.checks.proof import leaves_of
from gfsa.plugs.distributed import is_partitioned

Event = Literal["reached", "ran", "called", "ended"]


class FilterNotCalledError(RuntimeError):
    """A model ran, but a filter plugged into it did not."""

    names: tuple[str, ...] = ()
    """The layers whose filters were not called."""


class CallCheck:
    """Hooks on a model's plugged layers, each removed once the layer's filter has been called.

    At the end of a forward, a layer that ran without calling its filter raises an error that names
    it. So does, in evaluation, a layer that did not run although the block around it did. A layer
    whose block did not run stays under check: training may drop layers, and an input without images
    does not reach a vision tower. Events of a forward that raised, or of another thread, do not
    count. Where a caller runs a part of the model and never the model itself (``self.net(x)`` in a
    ``LightningModule``), a layer is checked when its own forward ends.
    """

    def __init__(
        self, model: nn.Module, plugged: Mapping[str, tuple[nn.Module, GraphFilter]]
    ) -> None:
        # with the thread in which each event was: another thread may be in the middle of a forward
        self.events: dict[str, set[tuple[int, Event]]] = {name: set() for name in plugged}
        self.handles: dict[str, list[RemovableHandle]] = {}
        # the threads in which the model's own forward has begun
        self.running: set[int] = set()
        self.around = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._check),
        ]
        for name, (module, filter) in plugged.items():
            self.handles[name] = [
                filter.register_forward_hook(_CallHook(self, name, "called")),
                module.register_forward_pre_hook(_CallHook(self, name, "ran")),
                module.register_forward_hook(_CallHook(self, name, "ended")),
                _owner(model, name).register_forward_pre_hook(_CallHook(self, name, "reached")),
            ]

    def note(self, name: str, event: Event, module: nn.Module) -> None:
        if event == "called":
            self.forget(name)
        elif event == "ended":
            alone = name in self.events and threading.get_ident() not in self.running
            if alone and not compiled_parts(module):
                self._raise_if_present([name], module)
        else:
            # another thread may have called the filter and removed the name in the meantime
            self.events.get(name, set()).add((threading.get_ident(), event))

    def forget(self, name: str) -> None:
        """Stop checking a layer: its filter was called, or detached."""
        self.events.pop(name, None)
        for handle in self.handles.pop(name, ()):
            handle.remove()
        if not self.events:
            self._end()

    def state(self) -> tuple[dict[str, set[tuple[int, Event]]], dict[str, list[RemovableHandle]]]:
        """What :meth:`set_state` needs to continue the check from here."""
        return {name: set(events) for name, events in self.events.items()}, dict(self.handles)

    def set_state(
        self,
        state: tuple[dict[str, set[tuple[int, Event]]], dict[str, list[RemovableHandle]]],
    ) -> None:
        """Go back to an earlier state; the hooks of the model are restored by the caller."""
        self.events, self.handles = state

    def __getstate__(self) -> dict[str, Any]:
        # torch cannot copy or unpickle a handle whose module is gone: a layer that the caller cut
        # off, or the model around a backbone that was kept
        gone = {n for n, handles in self.handles.items() if any(map(_lost_module, handles))}
        return {
            "events": {n: events for n, events in self.events.items() if n not in gone},
            "handles": {n: handles for n, handles in self.handles.items() if n not in gone},
            "around": [handle for handle in self.around if not _lost_module(handle)],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy runs nowhere yet
        self.__dict__.update(state, running=set())

    def _end(self) -> None:
        for handle in self.around:
            handle.remove()

    def _begin(self, model: nn.Module, args: Any) -> None:
        # an earlier forward of this thread may have raised before its check
        if not torch.compiler.is_compiling():
            self.running.add(threading.get_ident())
            self._take_events()

    def _take_events(self) -> dict[str, set[Event]]:
        """The events of this thread by layer, which are deleted."""
        thread = threading.get_ident()
        taken = {}
        for name, events in list(self.events.items()):
            own = {(number, event) for number, event in list(events) if number == thread}
            events -= own
            taken[name] = {event for _, event in own}
        return taken

    def _check(self, model: nn.Module, args: Any, output: Any) -> None:
        # while a graph is traced nothing runs, so nothing can be concluded
        if torch.compiler.is_compiling():
            return
        self.running.discard(threading.get_ident())
        if compiled := compiled_parts(model):
            self._drop_compiled(compiled)
            return
        # in training a block may skip its attention on purpose (stochastic depth)
        proof = "ran" if model.training else "reached"
        events = self._take_events()
        missing = [name for name in events if "ran" in events[name] or proof in events[name]]
        self._raise_if_present(missing, model)

    def _raise_if_present(self, missing: list[str], module: nn.Module) -> None:
        """Raise for filters that were not called, but for those that ``module`` has no longer."""
        if not missing:
            return
        # the caller may have replaced layers since, or filters alone
        hooks = [hook for hook in _call_hooks(module) if hook.check is self]
        present = {hook.name for hook in hooks if hook.event == "called"}
        for name in set(missing) - present:
            self.forget(name)
        missing = [name for name in missing if name in present]
        if missing:
            raise _not_called(missing)

    def _drop_compiled(self, compiled: list[str]) -> None:
        """End the check; hooks inside compiled modules do nothing there, and stay.

        Removing them would change the compiled code, and the next forward would compile again.
        """
        self._end()
        for name in list(self.events):
            if any(part == "" or f"{name}.".startswith(f"{part}.") for part in compiled):
                del self.events[name]
            else:
                self.forget(name)


class _CallHook:
    """A hook that reports one event of one layer to its check."""

    def __init__(self, check: CallCheck | None, name: str, event: Event) -> None:
        self.check = check
        self.name = name
        self.event = event

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if self.check is not None and not torch.compiler.is_compiling():
            self.check.note(self.name, self.event, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _CallHook:
        # a copied model gets a copied check; a copied filter that replaces the original in the same
        # model (peft) reports to the model's check
        if self.check is None or self.name not in self.check.events:
            # the check has ended: this hook stays only to keep compiled code valid
            return _CallHook(None, self.name, self.event)
        return _CallHook(memo.get(id(self.check), self.check), self.name, self.event)


def _not_called(names: list[str]) -> FilterNotCalledError:
    error = FilterNotCalledError(
        f"the model ran without calling the filter of {', '.join(names)}: its attention "
        "took a code path that bypasses the filter. gfsa.unplug(model), then "
        "plug(..., inputs=batch), which leaves out such layers, or plug(..., layers=...) "
        "without them"
    )
    error.names = tuple(names)
    return error


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
    """Check that the model's next forward calls each of these filters, and that training does."""
    if plugged:
        CallCheck(model, plugged)
        stop_watching_training(model)
        model.register_forward_hook(TrainingCheck())


def stop_watching_training(module: nn.Module) -> None:
    """End the check that training moves the filters of this module."""
    for hook in list(module._forward_hooks.values()):
        if isinstance(hook, TrainingCheck):
            hook._end(module)


def stop_checking(filter: GraphFilter) -> None:
    """End the check of one filter that has not been called yet."""
    for hook in list(filter._forward_hooks.values()):
        if isinstance(hook, _CallHook) and hook.check is not None:
            hook.check.forget(hook.name)


def checks_of(model: nn.Module) -> list[CallCheck]:
    """The checks that have not ended, of filters in this model."""
    return list({hook.check for hook in _call_hooks(model) if hook.check is not None})


def _call_hooks(model: nn.Module) -> list[_CallHook]:
    """The hooks on filters and layers of this model that note their calls."""
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    return [hook for hook in hooks if isinstance(hook, _CallHook)]


def _lost_module(handle: RemovableHandle) -> bool:
    return handle.hooks_dict_ref() is None


def _owner(model: nn.Module, name: str) -> nn.Module:
    """The block of a layer: the nearest module around it that has a forward."""
    while name:
        name = name.rpartition(".")[0]
        owner = model.get_submodule(name)
        if not isinstance(owner, nn.ModuleList | nn.ModuleDict):
            return owner
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
