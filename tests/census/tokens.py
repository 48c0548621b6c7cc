"""Find maps without powers although they are square: rows and columns are different tokens.

A module that is called with several tensors may take its queries from one of them and its keys from
another. Gradients show which: an argument that queries depend on and keys do not, beside one that
keys depend on and queries do not, is cross-attention, whatever the lengths are.

A module may also reorder its queries or keys. In self-attention ``log A[r,a] − log A[r,b]`` depends
on the tokens r, a and b, and on no other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from census.reference import AttentionMode

Leaves = dict[str, Tensor]
"""The tensors that one module was called with, by name, each as a leaf of the graph."""


class TokenProbe(AttentionMode):
    """Runs a model and fills :attr:`found`: module name → why its map has no powers.

    Args:
        model: the unplugged model.
        sites: the names of the attention modules to look at.
    """

    def __init__(self, model: nn.Module, sites: set[str]) -> None:
        super().__init__(model)
        self.model = model
        self.sites = sites
        self.calls: dict[str, Leaves] = {}
        self.found: dict[str, str] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        handles = [
            module.register_forward_pre_hook(self._arguments, with_kwargs=True)
            for name, module in self.model.named_modules()
            if name in self.sites
        ]
        try:
            with super().running():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _arguments(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves: Leaves = {}
        known: list[tuple[Tensor, Tensor]] = []

        def leaf(name: str, x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() not in (3, 4):
                return x
            for original, new in known:
                # equal copies are the same tokens
                if original is x or (original.shape == x.shape and torch.equal(original, x)):
                    return new.clone()
            new = x.detach().clone().requires_grad_()
            known.append((x, new))
            leaves[name] = new
            return new.clone()

        args = tuple(leaf(f"argument {place + 1}", x) for place, x in enumerate(args))
        kwargs = {name: leaf(name, x) for name, x in kwargs.items()}
        self.calls[self.names[id(module)]] = leaves
        return args, kwargs

    def call(self, function: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        self._compare(self.names.get(id(module), ""), args[0], args[1])
        self.paused = True
        try:
            return function(module, *args, **kwargs)
        finally:
            self.paused = False

    def replace(self, matrix: Tensor, query: Tensor | None, key: Tensor | None) -> Tensor:
        name = next((name for name in reversed(self.stack) if name in self.sites), "")
        if not (self.calls.get(name) and matrix.requires_grad and matrix.shape[-1] >= 4):
            return matrix
        if query is not None and key is not None:
            self._compare(name, query, key)
        else:
            self._look_at_a_row(name, matrix)
        self._look_at_the_order(name, matrix)
        return matrix

    def _compare(self, name: str, query: Tensor, key: Tensor) -> None:
        leaves = self.calls.get(name, {})
        if len(leaves) < 2 or not (query.requires_grad and key.requires_grad):
            return
        of_query, of_key = (
            {
                name
                for name, gradient in zip(leaves, self._gradients(x.sum(), leaves), strict=True)
                if gradient is not None and bool(gradient.any())
            }
            for x in (query, key)
        )
        self._judge(name, of_query, of_key)

    def _look_at_a_row(self, name: str, matrix: Tensor) -> None:
        """One row of A depends on one query and on all keys."""
        leaves = self.calls.get(name, {})
        if len(leaves) < 2:
            return
        weights = torch.linspace(-1, 1, matrix.shape[-1], dtype=matrix.dtype)
        gradients = self._gradients((matrix[..., 0, :] * weights).sum(), leaves)
        of_query, of_key = set(), set()
        for leaf, gradient in zip(leaves, gradients, strict=True):
            touched = _tokens_in(gradient, matrix.shape[-1])
            if touched is None:
                continue
            if len(touched) > 1:
                of_key.add(leaf)
            if len(touched) == 1:
                of_query.add(leaf)
        self._judge(name, of_query, of_key)

    def _look_at_the_order(self, name: str, matrix: Tensor) -> None:
        leaves = self.calls[name]
        length = matrix.shape[-1]
        first = matrix[(0,) * (matrix.dim() - 2)]
        for row in (length - 1, length // 2):
            columns = [c for c in range(length) if c != row and first[row, c] > 1e-12][:2]
            if len(columns) < 2:
                continue
            a, b = columns
            gradients = self._gradients(first[row, a].log() - first[row, b].log(), leaves)
            touched = set[int]().union(*(_tokens_in(g, length) or () for g in gradients))
            # more tokens: projections that look at neighbours, or maps that are mixed afterwards
            if len(touched) > 3:
                continue
            if not touched <= {row, a, b}:
                self.found[name] = (
                    f"its rows and columns are in different orders: entries ({row}, {a}) and "
                    f"({row}, {b}) of its map depend on tokens {sorted(touched)}"
                )

    def _gradients(self, y: Tensor, leaves: Leaves) -> tuple[Tensor | None, ...]:
        self.paused = True
        try:
            return torch.autograd.grad(
                y, list(leaves.values()), retain_graph=True, allow_unused=True
            )
        finally:
            self.paused = False

    def _judge(self, name: str, of_query: set[str], of_key: set[str]) -> None:
        only_query, only_key = of_query - of_key, of_key - of_query
        if only_query and only_key:
            self.found[name] = (
                f"it is cross-attention: queries come from {', '.join(sorted(only_query))}, keys "
                f"from {', '.join(sorted(only_key))}"
            )


def _tokens_in(gradient: Tensor | None, length: int) -> set[int] | None:
    """Which tokens a gradient reaches; None if the tensor has no axis of tokens."""
    if gradient is None or gradient.shape[-2:] == (length, length):
        return None
    axes = [axis for axis, size in enumerate(gradient.shape[:-1]) if size == length]
    if len(axes) != 1:
        return None
    sizes = gradient.movedim(axes[0], 0).flatten(1).abs().amax(1)
    # what cancels exactly on one CPU leaves a rounding on another
    reached = sizes > 1e-12 * sizes.max()
    return set(reached.nonzero().flatten().tolist())
