"""Prune filters: heads with negligible high-order coefficients skip the second pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gfsa.filters import GraphFilter, PartialPolynomial, Polynomial
from gfsa.filters.spec import check_number
from gfsa.plugs.adapter import CHILD
from gfsa.plugs.checks.called import watch_forwards
from gfsa.plugs.distributed import refuse_distributed
from gfsa.plugs.install import attach, detach, notify_adapters, refuse_changed_since
from gfsa.plugs.optim import watch_optimizers
from gfsa.plugs.running import call
from gfsa.plugs.sites import Site, plugged_sites, refuse_sharded, refuse_wrapped
from gfsa.plugs.transaction import all_or_nothing, unchanged


@dataclass
class PruneReport:
    """What :func:`prune` did, and how to undo it."""

    tolerance: float
    before: dict[str, list[int]] = field(default_factory=dict)
    """Module name → degree (attention passes) of each head before."""
    after: dict[str, list[int]] = field(default_factory=dict)
    """The same after; 1 is one pass, as in ordinary attention."""
    unplugged: list[str] = field(default_factory=list)
    """Layers whose filter had become ordinary attention and was removed."""
    largest_change: float | None = None
    """Largest absolute change of any output on ``inputs``; None without inputs."""
    _undo: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def passes_before(self) -> int:
        """Attention passes of one forward, summed over heads and layers."""
        return sum(map(sum, self.before.values()))

    @property
    def passes_after(self) -> int:
        return sum(map(sum, self.after.values()))

    def undo(self) -> None:
        """Put the old filters back into the model.

        Raises:
            ValueError: if filters were added, removed, replaced or trained since.
        """
        self._undo()

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
    r"""Remove the second pass of heads whose high-order coefficients are negligible, in place.

    .. math:: \sum_{k \ge 2} |c_{h,k}| \le \text{tolerance}
              \quad\Rightarrow\quad
              H_h = c_0 I + \Big(\sum_{k \ge 1} c_k\Big) A

    The output of a head changes by :math:`\sum_{k \ge 2} c_k (A^k - A) v`, at most twice the
    tolerance times the largest value. A layer none of whose heads needs a second pass becomes a
    polynomial of degree 1, or is unplugged if that is ordinary attention within the tolerance.

    The pruned filters are polynomials with new parameters, which an optimiser built before does not
    hold: prune after training, and before the model is distributed over processes.

    Args:
        model: a plugged model.
        tolerance: the largest sum of absolute coefficients that counts as negligible.
        inputs: a batch (a tensor, a dict of keyword or a tuple of positional arguments) on which
            the largest change of an output is measured, in evaluation mode.

    Returns:
        The passes before and after; ``report.undo()`` puts the old filters back.

    Raises:
        ValueError: if the model has no filters, they are wrapped by another library or distributed
            over processes, or ``tolerance`` is not a finite number of at least zero.
    """
    check_number("tolerance", tolerance, least=0.0)
    plugged = plugged_sites(model)
    if not plugged:
        raise ValueError(f"{type(model).__name__} has no filters to prune; gfsa.plug(model) first")
    refuse_wrapped(plugged)
    refuse_sharded(plugged, "prune")
    refuse_changed_since(list(plugged.values()))
    old = {name: site.filter for name, site in plugged.items()}
    # filters that are created in inference mode could never be trained
    with torch.inference_mode(False):
        pruned = {name: _pruned(filter, tolerance) for name, filter in old.items()}
    kept = {name: filter for name, filter in pruned.items() if filter is not None}

    def numbers() -> list[Tensor]:
        return [p.detach() for filter in kept.values() for p in filter.parameters()]

    before = [p.clone() for p in numbers()]

    def undo() -> None:
        now = {name: site.child for name, site in plugged_sites(model).items()}
        # wherever and in whatever dtype the numbers are now
        pairs = zip(numbers(), before, strict=True)
        if now != kept or not all(torch.equal(p, q.to(p)) for p, q in pairs):
            raise ValueError(
                "the filters of the model were changed since gfsa.prune, so undo would overwrite "
                "that change; gfsa.load an earlier save instead"
            )
        _exchange(model, plugged, old)

    report = PruneReport(
        float(tolerance),
        before={name: _degrees(filter) for name, filter in old.items()},
        after={
            name: [1] * old[name].num_heads if new is None else _degrees(new)
            for name, new in pruned.items()
        },
        unplugged=[name for name, new in pruned.items() if new is None],
        _undo=undo,
    )
    expected = None if inputs is None else _outputs(model, inputs)
    with all_or_nothing(model):
        _exchange(model, plugged, pruned)
        if expected is not None:
            report.largest_change = _largest_difference(expected, _outputs(model, inputs))
    return report


def _exchange(
    model: nn.Module, sites: Mapping[str, Site], wanted: Mapping[str, GraphFilter | None]
) -> None:
    """Give each of these sites the wanted filter, or none, if it has another one."""
    fresh = {}
    with all_or_nothing(model), torch.inference_mode(False):
        for name, site in sites.items():
            old, new = getattr(site.module, CHILD, None), wanted[name]
            if old is not None and old is not new:
                detach(replace(site, child=old))
            if new is not None and old is not new:
                attach(site, new)
                fresh[name] = site.module, new
        learning = [module for module, filter in fresh.values() if filter.theta is not None]
        if learning:
            refuse_distributed(model, learning)
        notify_adapters(model, sites.values())
        watch_forwards(model, fresh)
        watch_optimizers(model)


def _pruned(old: GraphFilter, tolerance: float) -> GraphFilter | None:
    """The filter that replaces ``old``; None if ordinary attention replaces it."""
    coefficients = old.coefficients().double().cpu()
    heads, degree = old.num_heads, old.degree
    rest = coefficients[:, 2:].abs().sum(-1)
    high = [head for head in range(heads) if rest[head] > tolerance]
    for head in set(range(heads)) - set(high) if degree else ():
        coefficients[head, 1] = coefficients[head, 1:].sum()
        coefficients[head, 2:] = 0.0
    # an exclusive or a depth term stays: only high powers are pruned beside it
    has_terms = old.share() is not None or old.first_values is not None
    if degree and not high and not has_terms:
        off = coefficients[:, 0].abs() + (coefficients[:, 1] - 1).abs()
        if bool((off <= tolerance).all()):
            return None
    if degree < 2 or len(high) == heads:
        return old
    new = PartialPolynomial(heads, degree, high) if high else Polynomial(heads, degree=1)
    new = new.to(old.base)
    new.set_coefficients(coefficients[:, : new.degree + 1])
    new._take_terms_of(old)
    new.train(old.training)
    return new.requires_grad_(old.theta is not None and old.theta.requires_grad)


def _degrees(filter: GraphFilter) -> list[int]:
    high = set(filter.high if isinstance(filter, PartialPolynomial) else range(filter.num_heads))
    return [filter.degree if head in high else 1 for head in range(filter.num_heads)]


def _outputs(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """Every floating-point tensor that the model returns in evaluation, by its path."""
    with unchanged(model):
        leaves, _ = pytree.tree_flatten_with_path(call(model.eval(), inputs))
    tensors = ((pytree.keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, Tensor))
    found = {path: tensor for path, tensor in tensors if tensor.is_floating_point()}
    if not found:
        raise ValueError(
            f"{type(model).__name__} returns no floating-point tensor on these inputs, so the "
            "change of its outputs cannot be measured; pass another batch, or leave inputs out"
        )
    return found


def _largest_difference(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    # a returned cache holds as many powers as the filter has: that does not change an output
    common = before.keys() & after.keys()
    pairs = [(before[key], after[key]) for key in common if before[key].shape == after[key].shape]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())
