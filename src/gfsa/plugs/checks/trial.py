"""A trial forward: which planned filters work on the caller's inputs, before any of them stays.

The model runs in evaluation mode without gradients, first without the planned filters, then with
them. Filters that start as ordinary attention must reproduce the output of each layer; others are
replaced by one that does for this comparison. Afterwards the model is as it was before: modules,
buffers, training modes, gradients and random generators.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gfsa.filters import GraphFilter, Polynomial
from gfsa.operators import LinearOperator
from gfsa.operators.call import AttentionCall
from gfsa.plugs.checks.called import FilterNotCalledError, checks_of
from gfsa.plugs.checks.proof import REASON, are_same_tokens
from gfsa.plugs.install import install, uninstall
from gfsa.plugs.registry import is_registered
from gfsa.plugs.running import call, same_random_numbers
from gfsa.plugs.sites import Site, plugged_sites
from gfsa.plugs.tracing.rehearsal import Reached, own_argument
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


Planned = Sequence[tuple[Site, GraphFilter]]

Outputs = dict[str | None, list[Tensor]]
"""Layer → some entries of what it returned, call by call; None is the model itself."""


def try_forward(
    model: nn.Module, planned: Planned, inputs: Any
) -> tuple[dict[str, str], list[str]]:
    """Run ``model`` on ``inputs`` with the planned filters; layers that fail are left out in turn.

    The model is unchanged afterwards, and the filters are free to be installed.

    Returns:
        Layer → why it cannot keep its filter; and the layers that the inputs do not reach, about
        whose filters nothing is known.

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
        plain = _run_plain(model, planned, inputs)
        plans = [planned]
        if not all(_starts_as_attention(filter) for _, filter in planned):
            plans.append([(site, _stand_in(filter)) for site, filter in planned])
        for plan in plans:
            while remaining := [pair for pair in plan if pair[0].name not in refused]:
                install(model, remaining)
                watch = _Watch(model, remaining, installed=True)
                try:
                    failed = _failures(watch, inputs)
                    waiting = [check.name for check in checks_of(model) if not check.called]
                finally:
                    now = plugged_sites(model)
                    uninstall(model, [now[site.name] for site, _ in remaining])
                if not failed and plan is plans[-1]:
                    failed = _changed(model, remaining, inputs, plain, watch.outputs)
                if not failed:
                    unreached = [site.name for site, _ in remaining if site.name in waiting]
                    break
                refused |= failed
    return refused, unreached


def _run_plain(model: nn.Module, planned: Planned, inputs: Any) -> Outputs:
    """What a model and its layers return without the planned filters."""
    watch = _Watch(model, planned, installed=False)
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
        planned = {site.name for site, _ in watch.planned}
        refused = dict.fromkeys(planned.intersection(error.names), BYPASSED)
        if not refused:
            raise
        return refused
    except _CrossAttentionError as error:
        return {watch.running[-1]: str(error)}
    except Exception as error:
        if not watch.running:
            raise ValueError(
                f"{type(watch.model).__name__} runs on these inputs, but with the filters it "
                f"raised outside of the attention layers: {_shown(error)}"
            ) from error
        return {watch.running[-1]: f"the trial forward raised {_shown(error)}"}
    return {}


class _CrossAttentionError(Exception):
    """A layer with an adapter of the user's own attends to another sequence."""


class _Watch:
    """Hooks that know which planned layer is running, and what each returned.

    If the filters are ``installed``, layers with an adapter of the user's own are checked for
    cross-attention.
    """

    def __init__(self, model: nn.Module, planned: Planned, installed: bool) -> None:
        self.model = model
        self.planned = planned
        self.installed = installed
        self.running: list[str] = []
        self.outputs: Outputs = {}

    def run(self, inputs: Any) -> None:
        """One forward of the model; ``running`` keeps the layers in which it raised."""
        handles = [self.model.register_forward_hook(functools.partial(self._leave, None))]
        for site, filter in self.planned:
            name = site.name
            if self.installed and is_registered(site.adapter):
                check = functools.partial(self._check, name, filter)
                handles.append(site.module.register_forward_pre_hook(check, with_kwargs=True))
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

    def _check(self, name: str, filter: GraphFilter, module: nn.Module, *call: Any) -> None:
        before = self.running, self.outputs
        self.running, self.outputs = [], {}
        try:
            crosses = _crosses(module, filter, *call)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # some modules run only without gradients
            crosses = False
            warnings.warn(
                f"whether {name} attends to its own tokens was not checked, because with "
                f"gradients it raised {_shown(error)}",
                stacklevel=2,
            )
        finally:
            self.running, self.outputs = before
        if crosses:
            raise _CrossAttentionError(
                f"{REASON}. In the trial forward it projects them from different arguments. If "
                "these hold the same tokens, as two norms of one x do, plug this layer on its own, "
                f"without inputs=: gfsa.plug(model, ..., layers=lambda name, module: name == "
                f"{name!r})"
            )

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
    if not filter.is_polynomial or filter.starts_exclusive or not filter.degree:
        return False
    plain = _stand_in(filter).coefficients().to(filter.coefficients())
    return torch.allclose(filter.coefficients(), plain, atol=1e-6)


def _stand_in(filter: GraphFilter) -> GraphFilter:
    """Ordinary attention as a filter of the same heads and degree."""
    identity = Polynomial(filter.num_heads, degree=max(1, filter.degree))
    identity.dropout_after = filter.dropout_after
    return identity


def _changed(
    model: nn.Module, planned: Planned, inputs: Any, plain: Outputs, outputs: Outputs
) -> dict[str, str]:
    """The first layer whose output the filters changed, with that as a reason."""
    changes = _changes(model, plain, outputs)
    if changes:
        # a model whose outputs differ from run to run shows nothing
        unsteady = _changes(model, plain, _run_plain(model, planned, inputs))
        changes = {name: change for name, change in changes.items() if name not in unsteady}
    for name, change in changes.items():
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


def _crosses(module: nn.Module, filter: GraphFilter, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a layer projects its queries and its keys from arguments that have none in common.

    Its forward runs up to its filter, with gradients, on leaves in place of its arguments. Of a map
    alone, and of what is projected elsewhere, nothing can be said.
    """
    arguments: list[tuple[Tensor, Tensor]] = []
    leaves: dict[int, Tensor] = {}
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            # equal tensors have one leaf
            same = (leaf for known, leaf in arguments if are_same_tokens(known, value))
            leaf = next(same, None)
            if leaf is None:
                leaf = value.detach().clone().requires_grad_()
                arguments.append((value, leaf))
            leaves[id(value)] = leaf
    weights = [w for w in module.parameters() if w.is_floating_point() and w.dim() > 1]
    sides: list[Tensor] = []

    def stop(filter: nn.Module, args: Any) -> None:
        operator: Any = args[0] if args else None
        if isinstance(operator, LinearOperator):
            sides.extend((operator.rows, operator.columns))
        elif isinstance(getattr(operator, "call", None), AttentionCall):
            sides.extend((operator.call.q, operator.call.k))
        raise Reached

    with ExitStack() as stack:
        stack.enter_context(same_random_numbers(module.parameters()))
        stack.enter_context(torch.enable_grad())
        for weight in weights:
            if not weight.requires_grad:
                weight.requires_grad_(True)
                stack.callback(weight.requires_grad_, False)
        stack.callback(filter.register_forward_pre_hook(stop).remove)
        with suppress(Reached):
            named = {name: own_argument(value, leaves) for name, value in kwargs.items()}
            module.forward(*(own_argument(value, leaves) for value in args), **named)
        by_weights = [_used(side, weights) for side in sides]
        by_arguments = [_used(side, [leaf for _, leaf in arguments]) for side in sides]
    used = [*by_weights, *by_arguments]
    return bool(used) and all(used) and by_arguments[0].isdisjoint(by_arguments[1])


def _used(x: Tensor, leaves: Sequence[Tensor]) -> set[int]:
    """The ids of the leaves that a tensor was computed from."""
    if not (leaves and x.requires_grad):
        return set()
    gradients = torch.autograd.grad(x.sum(), leaves, retain_graph=True, allow_unused=True)
    return {id(leaf) for leaf, grad in zip(leaves, gradients, strict=True) if grad is not None}


def _shown(error: Exception) -> str:
    """An error in one line."""
    # what to do about a plugged layer that raises is no advice for one that is skipped
    text = " ".join(str(error).split()).partition(" gfsa.unplug(model)")[0]
    kind = type(error).__name__
    return f"{kind}: {text[:400]}{'…' if len(text) > 400 else ''}" if text else kind
