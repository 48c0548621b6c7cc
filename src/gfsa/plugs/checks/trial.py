"""A trial forward: which planned filters work on the caller's inputs, before any of them stays.

The model runs in evaluation mode without gradients, first without the planned filters, then with
them. Filters that start as ordinary attention must reproduce the output of each layer; others are
replaced by one that does for this comparison. Afterwards the model is as it was before: modules,
buffers, training modes, gradients and random generators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gfsa.filters import GraphFilter, Polynomial
from gfsa.operators import DenseOperator
from gfsa.plugs.adapter import CHILD
from gfsa.plugs.checks.called import FilterNotCalledError
from gfsa.plugs.checks.proof import REASON, layers_that_cross
from gfsa.plugs.install import install, uninstall
from gfsa.plugs.registry import is_registered
from gfsa.plugs.running import call, same_random_numbers
from gfsa.plugs.sites import Site
from gfsa.plugs.transaction import unchanged

BYPASSED = "in the trial forward it, or the block around it, ran without calling its filter"
UNREACHED = "not reached by the trial forward"

# by how much of a layer's largest output its outputs may change: kernels round differently
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 3e-3}
_HALF_TOLERANCE = 5e-2
# rounding grows on its way through a model
_WHOLE_MODEL = 4
# how many entries of an output are kept for the comparison
_ENTRIES = 1 << 16


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
    with unchanged(model), torch.no_grad(), _uncompiled():
        model.eval()
        remaining = {site.name: (site, filter) for site, filter in planned}
        plain = _Plain(model, remaining, inputs)
        plans = [remaining]
        if not all(_starts_as_attention(filter) for _, filter in planned):
            plans.append({name: (site, _stand_in(f)) for name, (site, f) in remaining.items()})
        for plan in plans:
            remaining = {name: pair for name, pair in plan.items() if name not in trial.refused}
            while remaining:
                install(model, list(remaining.values()))
                try:
                    attempt = _attempt(model, remaining, inputs)
                finally:
                    uninstall(model, [_attached(site) for site, _ in remaining.values()])
                if not attempt.refused and plan is plans[-1]:
                    attempt.refused = plain.refused_by(attempt.outputs)
                if not attempt.refused:
                    trial.unreached = attempt.unreached
                    break
                trial.refused |= attempt.refused
                remaining = {
                    name: pair for name, pair in remaining.items() if name not in attempt.refused
                }
    return trial


@dataclass
class _Attempt(Trial):
    """What one forward with filters found."""

    outputs: Outputs = field(default_factory=dict)
    """What the layers returned."""


def _attempt(
    model: nn.Module, planned: Mapping[str, tuple[Site, GraphFilter]], inputs: Any
) -> _Attempt:
    """Run the model with installed filters; a layer that fails is refused."""
    watch = _Watch(model, planned)
    try:
        with same_random_numbers(_tensors_of(model)):
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
    finally:
        watch.remove()
    unreached = [name for name in planned if name not in watch.called]
    refused = _crossing(model, planned, inputs)
    return _Attempt(refused, unreached, watch.outputs)


def _crossing(
    model: nn.Module, planned: Mapping[str, tuple[Site, GraphFilter]], inputs: Any
) -> dict[str, str]:
    """The layers with an adapter of the user's own that attend to another sequence."""
    own = {
        name: (site.module, filter)
        for name, (site, filter) in planned.items()
        if is_registered(site.adapter)
    }
    if not own:
        return {}
    with same_random_numbers(_tensors_of(model)):
        crossing = layers_that_cross(own, lambda: call(model, inputs))
    return {
        name: f"{REASON}. In the trial forward it projects them from different arguments. If these "
        "hold the same tokens, as two norms of one x do, plug this layer on its own, without "
        f"inputs=: gfsa.plug(model, ..., layers=lambda name, module: name == {name!r})"
        for name in own
        if name in crossing
    }


def _starts_as_attention(filter: GraphFilter) -> bool:
    """Whether a filter that has learned nothing is ordinary attention, tried on a small map."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, filter.num_heads, 3, 3, generator=generator)
    values = torch.randn(1, filter.num_heads, 3, 2, generator=generator)
    matrix = scores.softmax(-1)
    try:
        return torch.allclose(filter(DenseOperator(matrix), values), matrix @ values, atol=1e-6)
    except Exception:
        # a filter that is no function of the map alone
        return False


def _stand_in(filter: GraphFilter) -> GraphFilter:
    """Ordinary attention as a filter of the same heads and degree."""
    identity = Polynomial(filter.num_heads, degree=max(1, filter.degree))
    identity.dropout_after = filter.dropout_after
    return identity


class _Plain:
    """The outputs of a model's layers without the planned filters.

    Raises:
        ValueError: if the model does not run on these inputs.
    """

    def __init__(
        self, model: nn.Module, planned: Mapping[str, tuple[Site, GraphFilter]], inputs: Any
    ) -> None:
        self.model, self.planned, self.inputs = model, planned, inputs
        self.half = torch.is_autocast_enabled(_device_type(model)) or any(
            p.is_floating_point() and p.dtype not in _TOLERANCE for p in model.parameters()
        )
        try:
            self.outputs = self._run()
        except Exception as error:
            raise ValueError(
                f"the trial forward needs inputs that {type(model).__name__} runs on; without any "
                f"new filter it raised {_shown(error)}"
            ) from error

    def _run(self) -> Outputs:
        watch = _Watch(self.model, self.planned)
        try:
            with same_random_numbers(_tensors_of(self.model)):
                call(self.model, self.inputs)
        finally:
            watch.remove()
        return watch.outputs

    def refused_by(self, outputs: Outputs) -> dict[str, str]:
        """The first layer whose output the filters changed, with that as a reason."""
        _, change = self._first_change(outputs)
        if not change:
            return {}
        # a model whose outputs differ from run to run shows nothing
        again = self._run()
        stable = {n: x for n, x in outputs.items() if not self._first_change({n: again[n]})[1]}
        name, change = self._first_change(stable)
        if not change:
            return {}
        if name is None:
            raise ValueError(
                f"the output of {type(self.model).__name__} {change}, although no layer with a "
                f"filter returned another output. {_CAUSES}"
            )
        return {name: f"its output {change}. {_CAUSES}"}

    def _first_change(self, outputs: Outputs) -> tuple[str | None, str]:
        """The first layer, in the order of the forward, that differs, and by how much."""
        for name, calls in outputs.items():
            for plain, x in zip(self.outputs.get(name, ()), calls, strict=False):
                half = self.half or plain.dtype not in _TOLERANCE
                tolerance = _HALF_TOLERANCE if half else _TOLERANCE[plain.dtype]
                change = _change(plain, x, tolerance * (_WHOLE_MODEL if name is None else 1))
                if change:
                    return name, change
        return None, ""


_CAUSES = (
    "A filter that has learned nothing is ordinary attention, so the adapter computes another "
    "attention than the layer. Usual causes: a mask or is_causal that is not passed on, another "
    "scale, a missing transpose of tokens and heads, a bias or a norm that is left out"
)


def _change(plain: Tensor, x: Tensor, tolerance: float) -> str:
    """By how much the outputs of two forwards differ, or nothing if they are the same."""
    if plain.shape != x.shape:
        return f"has {x.numel()} entries with its filter and {plain.numel()} without"
    finite = plain.isfinite()
    plain, x = plain[finite].double(), x[finite].double()
    if not plain.numel():
        return ""
    change, largest = float((x - plain).abs().max()), float(plain.abs().max())
    if change <= tolerance * largest:
        return ""
    return f"changes by {change:.2g} (its largest entry is {largest:.2g}) with its filter"


def _tensors_of(model: nn.Module) -> tuple[Tensor, ...]:
    return (*model.parameters(), *model.buffers())


def _device_type(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters() if not p.is_meta), "cpu")


Outputs = dict[str | None, list[Tensor]]
"""Layer → some entries of what it returned, call by call; None is the model itself."""


class _Watch:
    """Hooks that know which planned layer is running, whose filter was called, and the outputs."""

    def __init__(self, model: nn.Module, planned: Mapping[str, tuple[Site, GraphFilter]]) -> None:
        self.running: list[str] = []
        self.called: set[str] = set()
        self.outputs: Outputs = {}
        self.handles = [model.register_forward_hook(self._keep(None))]
        for name, (site, filter) in planned.items():
            # prepended: hooks of the adapter may raise, too
            self.handles += [
                site.module.register_forward_pre_hook(self._enter(name), prepend=True),
                site.module.register_forward_hook(self._leave),
                site.module.register_forward_hook(self._keep(name)),
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

    def _keep(self, name: str | None) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            # what follows the first tensor may be attention weights or a cache
            x = next((x for x in tree_leaves(output) if isinstance(x, Tensor)), None)
            if x is None or type(x) is not Tensor or x.is_nested or x.is_meta:
                return
            if x.is_floating_point() and x.layout is torch.strided:
                entries = x.detach().reshape(-1)[:: max(1, x.numel() // _ENTRIES)].clone()
                self.outputs.setdefault(name, []).append(entries)

        return keep


def _attached(site: Site) -> Site:
    """The site as it is with its filter."""
    return Site(site.name, site.module, site.adapter, site.module.get_submodule(CHILD))


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
