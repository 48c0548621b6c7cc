"""Find cross-attention that an adapter of the user's own would plug, if its lengths are equal.

Shapes do not show it, the autograd graph does: a layer runs with a leaf for each tensor argument,
and where its filter is called, q and k are followed back. Both are projected by weights of the
layer, from arguments of which none is common to them: they are different tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.filters import GraphFilter
from gfsa.operators import LinearOperator
from gfsa.operators.call import AttentionCall
from gfsa.plugs.checks.proof import REASON, are_same_tokens


def refusal_of_crossing(name: str) -> str:
    """Why a layer is skipped, and what to do if its arguments hold the same tokens after all."""
    return (
        f"{REASON}. In the trial forward it projects them from different arguments. If these hold "
        "the same tokens, as two norms of one x do, plug this layer on its own, without inputs=: "
        f"gfsa.plug(model, ..., layers=lambda name, module: name == {name!r})"
    )


class Crossing:
    """Hooks that follow q and k of layers back to the arguments of their forward."""

    def __init__(self, watched: Mapping[str, tuple[nn.Module, GraphFilter]]) -> None:
        self.found: set[str] = set()
        self.looked_at: set[str] = set()
        self._calls: list[_Call] = []
        self._handles: list[Any] = []
        for name, (module, filter) in watched.items():
            self._handles += [
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
                filter.register_forward_pre_hook(self._look(name)),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        # what a forward that raised has left
        while self._calls:
            self._calls.pop().end()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        call = _Call()
        # first, so that it ends whatever its begin raises
        self._calls.append(call)
        call.begin(module)
        return (
            tuple(call.argument(value) for value in args),
            {key: call.argument(value) for key, value in kwargs.items()},
        )

    def _look(self, name: str) -> Any:
        def look(filter: nn.Module, args: Any) -> None:
            self.looked_at.add(name)
            pair = _queries_and_keys(args[0]) if args else None
            if pair is not None and self._calls and self._calls[-1].crosses(*pair):
                self.found.add(name)

        return look

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._calls:
            self._calls.pop().end()
        return output.detach() if isinstance(output, Tensor) else output


class _Call:
    """One forward of a layer, with gradients."""

    def __init__(self) -> None:
        self.grad_before = torch.is_grad_enabled()
        self.weights: set[int] = set()
        self.frozen: list[Tensor] = []
        # each with its leaf; equal tensors have one
        self.arguments: list[tuple[Tensor, Tensor]] = []

    def begin(self, module: nn.Module) -> None:
        torch.set_grad_enabled(True)
        for weight in module.parameters():
            if weight.is_floating_point() and weight.dim() > 1:
                self.weights.add(id(weight))
                if not weight.requires_grad:
                    weight.requires_grad_(True)
                    self.frozen.append(weight)

    def end(self) -> None:
        for weight in self.frozen:
            weight.requires_grad_(False)
        torch.set_grad_enabled(self.grad_before)

    def argument(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        same = (leaf for known, leaf in self.arguments if are_same_tokens(known, value))
        leaf = next(same, None)
        if leaf is None:
            leaf = value.detach().clone().requires_grad_()
            self.arguments.append((value, leaf))
        # a copy: the layer may write into it
        return leaf.clone()

    def crosses(self, q: Tensor, k: Tensor) -> bool:
        leaves = {id(leaf) for _, leaf in self.arguments}
        of_q, of_k = leaves_of(q), leaves_of(k)
        if not (of_q & self.weights and of_k & self.weights):
            # what is projected elsewhere may come from one tensor
            return False
        return bool(of_q & leaves and of_k & leaves) and not of_q & of_k & leaves


def _queries_and_keys(operator: Any) -> tuple[Tensor, Tensor] | None:
    call = getattr(operator, "call", None)
    if isinstance(call, AttentionCall):
        return call.q, call.k
    if isinstance(operator, LinearOperator):
        return operator.rows, operator.columns
    # of a map alone nothing can be said
    return None


def leaves_of(x: Tensor) -> set[int]:
    """The ids of the leaves that a tensor was computed from."""
    found: set[int] = set()
    seen: set[Any] = set()
    nodes = [x.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(id(leaf))
        nodes += [following for following, _ in node.next_functions]
    return found


def layers_that_cross(
    watched: Mapping[str, tuple[nn.Module, GraphFilter]], run: Callable[[], object]
) -> set[str]:
    """The layers whose queries and keys are projections of different arguments.

    Args:
        watched: the plugged layers and their filters, by name.
        run: a forward of the model.
    """
    if not watched:
        return set()
    crossing = Crossing(watched)
    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # some models run only without gradients, as in the trial before
        unchecked = [name for name in watched if name not in crossing.looked_at]
        warnings.warn(
            f"whether {', '.join(unchecked)} attend to their own tokens was not checked, because "
            f"with gradients the model raised {type(error).__name__}: {str(error)[:200]}",
            stacklevel=2,
        )
    finally:
        crossing.remove()
    return crossing.found
