"""A trial forward: which planned filters work on the caller's inputs, before any of them stays.

The model runs in evaluation mode without gradients, first without the planned filters, then with
them. Filters that start as ordinary attention must reproduce the output of each layer; others are
replaced by one that does for this comparison. Afterwards the model is as it was before.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gfsa.filters import GraphFilter, Polynomial
from gfsa.operators import LinearOperator
from gfsa.operators.call import AttentionCall
from gfsa.plugs.adapter import CHILD
from gfsa.plugs.checks.called import FilterNotCalledError, checks_of
from gfsa.plugs.checks.proof import REASON, are_same_tokens
from gfsa.plugs.install import install, uninstall
from gfsa.plugs.registry import is_registered
from gfsa.plugs.running import call, same_random_numbers
from gfsa.plugs.sites import Site, plugged_sites
from gfsa.plugs.tracing.adapter import inputs_of
from gfsa.plugs.tracing.capture import Reached, own_argument
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


Planned = Mapping[str, tuple[Site, GraphFilter]]

Outputs = dict[str | None, list[Tensor]]
"""Layer → some entries of what it returned, call by call; None is the model itself."""


def try_forward(
    model: nn.Module, planned: Sequence[tuple[Site, GraphFilter]], inputs: Any
) -> tuple[dict[str, str], list[str]]:
    """Run ``model`` on ``inputs`` with the planned filters; layers that fail are left out in turn.

    Returns:
        Layer → why it cannot keep its filter; and the layers that the inputs do not reach.

    Raises:
        ValueError: if the model does not run on these inputs without the filters, or fails
            outside of its attention layers with them.
    """
    refused: dict[str, str] = {}
    unreached: list[str] = []
    # compiled models run uncompiled: the trial does not pay for a compilation
    uncompiled: Any = torch.compiler.set_stance("force_eager")
    with uncompiled, unchanged(model), torch.no_grad():
        model.eval()
        plan: Planned = {site.name: (site, filter) for site, filter in planned}
        plain = _run_plain(model, plan, inputs)
        plans: list[Planned] = [plan]
        if not all(_starts_as_attention(filter) for _, filter in planned):
            # ordinary attention as a filter of the same heads and degree
            stand_in = {n: Polynomial(f.num_heads, max(1, f.degree)) for n, (_, f) in plan.items()}
            plans.append({name: (site, stand_in[name]) for name, (site, _) in plan.items()})
        for plan in plans:
            while remaining := {n: pair for n, pair in plan.items() if n not in refused}:
                install(model, list(remaining.values()))
                watch = _Watch(model, remaining)
                try:
                    failed = _failures(watch, inputs)
                    waiting = [check.name for check in checks_of(model) if not check.called]
                finally:
                    now = plugged_sites(model)
                    uninstall(model, [now[name] for name in remaining])
                if not failed and plan is plans[-1]:
                    failed = _changed(model, remaining, inputs, plain, watch.outputs)
                if not failed:
                    unreached = [name for name in remaining if name in waiting]
                    break
                refused |= failed
    return refused, unreached


def _run_plain(model: nn.Module, planned: Planned, inputs: Any) -> Outputs:
    """What a model and its layers return without the planned filters."""
    watch = _Watch(model, planned)
    try:
        watch.run(inputs)
    except Exception as error:
        raise ValueError(
            f"the trial forward needs inputs that {type(model).__name__} runs on; without any new "
            f"filter it raised {_shown(error)}"
        ) from error
    return watch.outputs


def _failures(watch: _Watch, inputs: Any) -> dict[str, str]:
    """Run the model with installed filters; the layers that fail, with the reason."""
    try:
        watch.run(inputs)
    except torch.OutOfMemoryError:
        raise
    except FilterNotCalledError as error:
        if refused := {name: BYPASSED for name in error.names if name in watch.planned}:
            return refused
        raise
    except Exception as error:
        if not watch.running:
            raise ValueError(
                f"{type(watch.model).__name__} runs on these inputs, but with the filters it "
                f"raised outside of the attention layers: {_shown(error)}"
            ) from error
        return {watch.running[-1]: f"the trial forward raised {_shown(error)}"}
    if watch.unchecked:
        first = next(iter(watch.unchecked.values()))
        warnings.warn(
            f"whether {', '.join(watch.unchecked)} attend to their own tokens was not checked, "
            f"because with gradients the model raised {type(first).__name__}: {str(first)[:200]}",
            stacklevel=2,
        )
    return watch.crossing


_CROSSES = (
    f"{REASON}. In the trial forward it projects them from different arguments. If these hold the "
    "same tokens, as two norms of one x do, plug this layer on its own, without inputs=: "
    "gfsa.plug(model, ..., layers=lambda name, module: name == {name!r})"
)


@dataclass(eq=False)
class _Watch:
    """Hooks that know which planned layer is running, and what each returned."""

    model: nn.Module
    planned: Planned
    running: list[str] = field(default_factory=list)
    outputs: Outputs = field(default_factory=dict)
    # layers that attend to another sequence, and those of which that is not known
    crossing: dict[str, str] = field(default_factory=dict)
    unchecked: dict[str, Exception] = field(default_factory=dict)

    def run(self, inputs: Any) -> None:
        """One forward of the model; ``running`` keeps the layers in which it raised."""
        handles = [self.model.register_forward_hook(functools.partial(self._leave, None))]
        for name, (site, filter) in self.planned.items():
            if is_registered(site.adapter) and getattr(site.module, CHILD, None) is filter:
                look = functools.partial(self._look, name)
                handles.append(site.module.register_forward_pre_hook(look, with_kwargs=True))
            handles += [
                # prepended: hooks of the adapter may raise, too
                site.module.register_forward_pre_hook(
                    lambda module, args, name=name: self.running.append(name), prepend=True
                ),
                site.module.register_forward_hook(functools.partial(self._leave, name)),
            ]
        try:
            with same_random_numbers((*self.model.parameters(), *self.model.buffers())):
                call(self.model, inputs)
        finally:
            for handle in handles:
                handle.remove()

    def _look(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a layer with an adapter of the user's own: whether its tokens are its own."""
        try:
            # the forward itself follows, and finds what a layer keeps as it was
            with same_random_numbers(module.parameters()), unchanged(module):
                crosses = _crosses(module, self.planned[name][1], args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # some layers run only without gradients
            self.unchecked[name] = error
        else:
            if crosses:
                self.crossing[name] = _CROSSES.format(name=name)

    def _leave(self, name: str | None, module: nn.Module, args: Any, output: Any) -> None:
        if name is not None:
            self.running.pop()
        # what follows the first tensor may be attention weights or a cache
        x = next((x for x in tree_leaves(output) if isinstance(x, Tensor)), None)
        if x is None or type(x) is not Tensor or x.is_nested or x.is_meta:
            return
        if x.is_floating_point() and x.layout is torch.strided:
            entries = x.detach().reshape(-1)[:: max(1, x.numel() // _ENTRIES)].clone()
            self.outputs.setdefault(name, []).append(entries)


def _starts_as_attention(filter: GraphFilter) -> bool:
    """Whether a filter that has learned nothing is certainly ordinary attention."""
    if not filter.is_polynomial or filter.starts_exclusive:
        return False
    coefficients = filter.coefficients()
    plain = torch.zeros_like(coefficients)
    plain[:, 1:2] = 1.0
    return torch.allclose(coefficients, plain, atol=1e-6)


def _changed(
    model: nn.Module, planned: Planned, inputs: Any, plain: Outputs, outputs: Outputs
) -> dict[str, str]:
    """The first layer whose output the filters changed, with that as a reason."""
    changes = _changes(model, plain, outputs)
    # a model whose outputs differ from run to run shows nothing
    unsteady = _changes(model, plain, _run_plain(model, planned, inputs)) if changes else {}
    for name, change in changes.items():
        if name in unsteady:
            continue
        if name is not None:
            return {name: f"its output {change}. {_CAUSES}"}
        raise ValueError(
            f"the output of {type(model).__name__} {change}, although no layer with a filter "
            f"returned another output. {_CAUSES}"
        )
    return {}


_CAUSES = (
    "A filter that has learned nothing is ordinary attention, so the adapter computes another "
    "attention than the layer. Usual causes: a mask or is_causal that is not passed on, another "
    "scale, a missing transpose of tokens and heads, a bias or a norm that is left out"
)


def _changes(model: nn.Module, plain: Outputs, outputs: Outputs) -> dict[str | None, str]:
    """How outputs differ from the plain ones, in the order of the forward."""
    device = next((p.device.type for p in model.parameters() if not p.is_meta), "cpu")
    half = torch.is_autocast_enabled(device) or any(
        p.is_floating_point() and p.dtype not in _TOLERANCE for p in model.parameters()
    )
    found: dict[str | None, str] = {}
    for name, calls in outputs.items():
        for before, now in zip(plain.get(name, ()), calls, strict=False):
            if before.shape != now.shape:
                found[name] = (
                    f"has {now.numel()} entries with its filter and {before.numel()} without"
                )
                break
            finite = before.isfinite()
            before, now = before[finite], now[finite]
            if not before.numel():
                continue
            tolerance = _HALF_TOLERANCE if half else _TOLERANCE.get(before.dtype, _HALF_TOLERANCE)
            tolerance *= _WHOLE_MODEL if name is None else 1
            largest = float(before.double().abs().max())
            change = float((now.double() - before.double()).abs().max())
            # NaN counts as a change
            if not change <= tolerance * largest:
                found[name] = (
                    f"changes by {change:.2g} (its largest entry is {largest:.2g}) with its filter"
                )
                break
    return found


def _crosses(module: nn.Module, filter: GraphFilter, args: Any, kwargs: Any) -> bool:
    """Whether a layer projects its queries and keys itself, from arguments without a common one.

    It runs up to its filter, with gradients to its arguments and weights.
    """
    weights = [w for w in module.parameters() if w.is_floating_point() and w.dim() > 1]
    given = list(inputs_of({**{str(i): x for i, x in enumerate(args)}, **kwargs}).values())
    leaves: dict[int, Tensor] = {}
    for x in given:
        # equal tensors have one leaf
        first = next(y for y in given if are_same_tokens(y, x))
        leaves[id(x)] = leaves.get(id(first), x.detach().clone().requires_grad_())
    operator: Any = None

    def own(argument: Any) -> Any:
        try:
            return own_argument(argument, leaves)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            # some objects cannot be copied, a lock say: the layer gets the caller's own
            return argument

    def reach(filter: nn.Module, args: Any) -> None:
        nonlocal operator
        operator = next(iter(args), None)
        raise Reached

    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.callback(filter.register_forward_pre_hook(reach, prepend=True).remove)
        for weight in weights:
            stack.callback(weight.requires_grad_, weight.requires_grad)
            weight.requires_grad_(True)
        with suppress(Reached):
            module.forward(*map(own, args), **{name: own(x) for name, x in kwargs.items()})
        if isinstance(operator, LinearOperator):
            sides = operator.rows, operator.columns
        elif isinstance(getattr(operator, "call", None), AttentionCall):
            sides = operator.call.q, operator.call.k
        else:
            # of a map alone nothing can be said
            return False
        known = [*weights, *leaves.values()]
        sources = []
        for side in sides:
            if not side.requires_grad:
                return False
            gradients = torch.autograd.grad(side.sum(), known, allow_unused=True, retain_graph=True)
            sources.append({id(x) for x, g in zip(known, gradients, strict=True) if g is not None})
    (q, k), arguments = sources, set(map(id, leaves.values()))
    # what is projected elsewhere may come from one tensor
    projected = bool(q - arguments and k - arguments)
    return bool(projected and q & arguments and k & arguments) and not q & k & arguments


def _shown(error: Exception) -> str:
    """An error in one line."""
    # what to do about a plugged layer that raises is no advice for one that is skipped
    text = " ".join(str(error).split()).partition(" gfsa.unplug(model)")[0]
    kind = type(error).__name__
    return f"{kind}: {text[:400]}{'…' if len(text) > 400 else ''}" if text else kind
