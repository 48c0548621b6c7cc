"""Prune filters: heads that have no use for a second pass stop paying for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gfsa.filters import GraphFilter, Polynomial
from gfsa.filters.partial import PartialPolynomial
from gfsa.plugs.adapter import CHILD
from gfsa.plugs.call_check import stop_watching, watch_first_forward
from gfsa.plugs.plug import (
    Socket,
    attach,
    detach,
    finish,
    refuse_sharded,
    refuse_wrapped,
    sockets_of,
)


@dataclass
class PruneReport:
    """What :func:`prune` did, and the way back."""

    tolerance: float
    before: dict[str, list[int]] = field(default_factory=dict)
    """Module name → degree (attention passes) of each head before."""
    after: dict[str, list[int]] = field(default_factory=dict)
    """The same after; 1 is one pass, as in plain attention."""
    unplugged: list[str] = field(default_factory=list)
    """Layers that had become ordinary attention and have no filter any more."""
    largest_change: float | None = None
    """Largest absolute change of any output on the inputs given, if any were."""
    _model: nn.Module | None = field(default=None, repr=False)
    _sockets: dict[str, Socket] = field(default_factory=dict, repr=False)

    @property
    def passes_before(self) -> int:
        """Attention passes of one forward, summed over heads and layers."""
        return sum(map(sum, self.before.values()))

    @property
    def passes_after(self) -> int:
        return sum(map(sum, self.after.values()))

    def undo(self) -> None:
        """Give the model its filters back, as they were."""
        assert self._model is not None
        for socket in self._sockets.values():
            if hasattr(socket.module, CHILD):
                socket.module.add_module(CHILD, socket.filter)
            else:
                attach(socket.module, socket.adapter, socket.filter)
        _settle(self._model, self._sockets)

    def __str__(self) -> str:
        total, left = self.passes_before, self.passes_after
        lines = [
            f"head passes {total} → {left} ({(total - left) / total:.0%} saved) at tolerance "
            f"{self.tolerance:g}"
            + ("" if self.largest_change is None else f"; outputs ≤ {self.largest_change:.2g} off")
        ]
        for name, degrees in self.after.items():
            high = [head for head, degree in enumerate(degrees) if degree > 1]
            state = f"{len(high)} of {len(degrees)} heads keep degree {max(degrees)}"
            if not high:
                state = "unplugged: ordinary attention" if name in self.unplugged else "degree 1"
            lines.append(f"  {name}: {state}")
        return "\n".join(lines)


@torch.no_grad()
def prune(model: nn.Module, tolerance: float = 1e-3, inputs: Any = None) -> PruneReport:
    r"""Spare the heads whose high-order coefficients are negligible their second pass, in place.

    .. math:: \sum_{k \ge 2} |c_{h,k}| \le \text{tolerance}
              \quad\Rightarrow\quad
              H_h = c_0 I + \Big(\sum_{k \ge 1} c_k\Big) A

    What is cut off is added to :math:`c_1`, so that a head's answer to equal tokens stays as it
    was and its output moves by :math:`\sum_{k \ge 2} c_k (A^k - A) v`, at most twice the tolerance
    times the largest value. A layer none of whose heads needs a second pass becomes a polynomial
    of degree 1, or is unplugged if what remains is ordinary attention within the tolerance.

    The filters become polynomials of numbers of their own (an optimiser made before holds the old
    ones): prune after training, before sharding. Saving and loading work as before.

    Args:
        model: a plugged model.
        tolerance: how small counts as negligible, for a sum of absolute coefficients.
        inputs: a batch (a tensor, a dict of keyword or a tuple of positional arguments) on which
            the largest change of an output is measured, in evaluation mode.

    Returns:
        What was saved; ``report.undo()`` puts the old filters back.
    """
    if not (isinstance(tolerance, (int, float)) and 0 <= tolerance <= sys.float_info.max):
        raise ValueError(f"tolerance must be a finite number of at least 0, got {tolerance!r}")
    sockets = sockets_of(model)
    if not sockets:
        raise ValueError(f"{type(model).__name__} has no filters to prune; gfsa.plug(model) first")
    refuse_wrapped(sockets)
    refuse_sharded(sockets, "prune")
    expected = None if inputs is None else _outputs(model, inputs)
    report = PruneReport(float(tolerance), _model=model, _sockets=sockets)
    for name, socket in sockets.items():
        report.before[name] = _degrees(socket.filter)
        made = _pruned(socket.filter, tolerance)
        report.after[name] = [1] * socket.filter.num_heads if made is None else _degrees(made)
        if made is None:
            report.unplugged.append(name)
            detach(socket)
        elif made is not socket.filter:
            socket.module.add_module(CHILD, made)
    _settle(model, sockets)
    if expected is not None:
        report.largest_change = _largest_difference(expected, _outputs(model, inputs))
    return report


def _pruned(old: GraphFilter, tolerance: float) -> GraphFilter | None:
    """What takes the place of ``old``; None where ordinary attention does."""
    coefficients = old.coefficients().double().cpu()
    heads, degree = old.num_heads, old.degree
    rest = coefficients[:, 2:].abs().sum(-1)
    high = [head for head in range(heads) if rest[head] > tolerance]
    if len(high) == heads or (degree < 2 and not _is_plain(coefficients, tolerance)):
        return old
    for head in set(range(heads)) - set(high):
        coefficients[head, 1] = coefficients[head, 1:].sum()
        coefficients[head, 2:] = 0.0
    if not high and _is_plain(coefficients, tolerance):
        return None
    made = PartialPolynomial(heads, degree, high) if high else Polynomial(heads, degree=1)
    made = made.to(old.base)
    made.set_coefficients(coefficients[:, : made.degree + 1])
    made.dropout_after = old.dropout_after
    made.train(old.training)
    return made.requires_grad_(old.theta is not None and old.theta.requires_grad)


def _is_plain(coefficients: Tensor, tolerance: float) -> bool:
    """Whether every head is ``A`` alone within the tolerance; the first two columns are asked."""
    if coefficients.shape[-1] < 2:
        return False
    off = coefficients[:, 0].abs() + (coefficients[:, 1] - 1).abs()
    return bool((off <= tolerance).all())


def _degrees(each: GraphFilter) -> list[int]:
    high = each.high if isinstance(each, PartialPolynomial) else range(each.num_heads)
    return [each.degree if head in set(high) else 1 for head in range(each.num_heads)]


def _settle(model: nn.Module, before: Mapping[str, Socket]) -> None:
    finish(model, {socket.adapter for socket in before.values()})
    now = sockets_of(model)
    kept = {id(socket.filter) for socket in now.values()}
    for socket in before.values():
        if id(socket.filter) not in kept:
            stop_watching(socket.filter)
    known = {id(socket.filter) for socket in before.values()}
    fresh = {n: (s.module, s.filter) for n, s in now.items() if id(s.filter) not in known}
    watch_first_forward(model, fresh)


def _outputs(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """Every floating-point tensor that the model returns, by where it stands."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        if isinstance(inputs, Mapping):
            output = model(**inputs)
        else:
            output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    finally:
        for module, training in modes:
            module.training = training
    leaves, _ = pytree.tree_flatten_with_path(output)
    found = {
        pytree.keystr(path): leaf
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} returns no floating-point tensor on these inputs, so no "
            "change can be measured"
        )
    return found


def _largest_difference(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    # what a cache keeps of a filter changes with the filter: it is no output
    common = before.keys() & after.keys()
    pairs = [(before[key], after[key]) for key in common if before[key].shape == after[key].shape]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())
