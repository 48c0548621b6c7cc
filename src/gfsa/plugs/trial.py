"""A trial forward: which planned filters work on the caller's inputs, before any of them stays.

The model runs in evaluation mode without gradients, with the planned filters in it. Afterwards it
is as it was before: modules, buffers, training modes, gradients and random generators.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gfsa.filters import GraphFilter
from gfsa.plugs.adapter import CHILD
from gfsa.plugs.attach import install, uninstall
from gfsa.plugs.call_check import FilterNotCalledError
from gfsa.plugs.crossing import CROSSING, layers_that_cross
from gfsa.plugs.registry import is_registered
from gfsa.plugs.rollback import unchanged
from gfsa.plugs.running import call
from gfsa.plugs.sites import Site

BYPASSED = "in the trial forward it, or the block around it, ran without calling its filter"
UNREACHED = "not reached by the trial forward"


@dataclass
class Trial:
    """What the trial forward found."""

    refused: dict[str, str] = field(default_factory=dict)
    """Layer → why it cannot keep its filter."""
    unreached: list[str] = field(default_factory=list)
    """Layers that the inputs do not reach, so nothing is known about their filters."""


def try_forward(
    model: nn.Module, planned: Sequence[tuple[Site, GraphFilter]], inputs: Any
) -> Trial:
    """Run ``model`` on ``inputs`` with the planned filters; layers that fail are left out in turn.

    Args:
        model: the model, which is unchanged afterwards.
        planned: the filters of the plan. They stay free to be installed afterwards.
        inputs: a tensor, a dict of keyword arguments or a tuple of positional arguments.

    Raises:
        ValueError: if the model does not run on these inputs without the filters, or fails
            outside of its attention layers with them.
    """
    trial = Trial()
    with unchanged(model), _same_random_numbers(model), torch.no_grad(), _uncompiled():
        model.eval()
        try:
            call(model, inputs)
        except Exception as error:
            raise ValueError(
                f"the trial forward needs inputs that {type(model).__name__} runs on; without any "
                f"new filter it raised {_shown(error)}"
            ) from error
        remaining = {site.name: (site, filter) for site, filter in planned}
        while remaining:
            install(model, list(remaining.values()))
            try:
                attempt = _attempt(model, remaining, inputs)
            finally:
                uninstall(model, [_attached(site) for site, _ in remaining.values()])
            trial.refused |= attempt.refused
            if attempt.is_last:
                trial.unreached = attempt.unreached
                break
            remaining = {
                name: pair for name, pair in remaining.items() if name not in attempt.refused
            }
    return trial


@dataclass
class _Attempt(Trial):
    """What one forward with filters found."""

    is_last: bool = False
    """Whether the forward ran to its end, so that no other has to follow."""


def _attempt(
    model: nn.Module, planned: Mapping[str, tuple[Site, GraphFilter]], inputs: Any
) -> _Attempt:
    """Run the model with installed filters; a layer that fails is refused."""
    watch = _Watch(planned)
    try:
        call(model, inputs)
    except torch.OutOfMemoryError:
        raise
    except FilterNotCalledError as error:
        refused = {name: BYPASSED for name in error.names if name in planned}
        if not refused:
            raise
        return _Attempt(refused)
    except Exception as error:
        if watch.innermost is None:
            raise ValueError(
                f"{type(model).__name__} runs on these inputs, but with the filters it "
                f"raised outside of the attention layers: {_shown(error)}"
            ) from error
        return _Attempt({watch.innermost: f"the trial forward raised {_shown(error)}"})
    else:
        unreached = [name for name in planned if name not in watch.called]
        return _Attempt(_crossing(model, planned, inputs), unreached, is_last=True)
    finally:
        watch.remove()


def _crossing(
    model: nn.Module, planned: Mapping[str, tuple[Site, GraphFilter]], inputs: Any
) -> dict[str, str]:
    """The layers with an adapter of the user's own that attend to another sequence."""
    own = {
        name: (site.module, filter)
        for name, (site, filter) in planned.items()
        if is_registered(site.adapter)
    }
    crossing = layers_that_cross(own, lambda: call(model, inputs))
    return dict.fromkeys(sorted(crossing, key=list(own).index), CROSSING)


class _Watch:
    """Hooks that know which planned layer is running and whose filter was called."""

    def __init__(self, planned: Mapping[str, tuple[Site, GraphFilter]]) -> None:
        self.running: list[str] = []
        self.called: set[str] = set()
        self.handles = []
        for name, (site, filter) in planned.items():
            # prepended: hooks of the adapter may raise, too
            self.handles += [
                site.module.register_forward_pre_hook(self._enter(name), prepend=True),
                site.module.register_forward_hook(self._leave),
                filter.register_forward_hook(self._note(name)),
            ]

    @property
    def innermost(self) -> str | None:
        """The layer that was running when the forward raised."""
        return self.running[-1] if self.running else None

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, name: str) -> Any:
        return lambda module, args: self.running.append(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()

    def _note(self, name: str) -> Any:
        return lambda module, args, output: self.called.add(name)


def _attached(site: Site) -> Site:
    """The site as it is with its filter."""
    return Site(site.name, site.module, site.adapter, site.module.get_submodule(CHILD))


@contextmanager
def _same_random_numbers(model: nn.Module) -> Iterator[None]:
    """The generators of torch, Python and numpy are afterwards as they were before."""
    import numpy

    tensors = (*model.parameters(), *model.buffers())
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    kinds = {device.type for device in devices} or {"cuda"}
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        with ExitStack() as stack:
            for kind in kinds:
                if kind == "mps":
                    # one device, whose generator takes no number
                    stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
                    continue
                numbers = sorted({d.index or 0 for d in devices if d.type == kind})
                stack.enter_context(torch.random.fork_rng(numbers, device_type=kind))
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Compiled models run uncompiled: the trial does not pay for a compilation."""
    stance: Any = torch.compiler.set_stance("force_eager")
    with stance:
        yield


def _shown(error: Exception) -> str:
    """An error in one line."""
    # what to do about a plugged layer that raises is no advice for one that is skipped
    text = " ".join(str(error).split()).partition(" gfsa.unplug(model)")[0]
    kind = type(error).__name__
    return f"{kind}: {text[:400]}{'…' if len(text) > 400 else ''}" if text else kind
