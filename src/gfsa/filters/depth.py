r"""The depth term: a layer adds the first layer's values to its own before it attends.

.. math:: V \leftarrow V + r_h\,V^0

It is a filter along the layers ("value residual", ResFormer, arXiv 2410.17897). r is learned per
head and starts at 0. Heads that share a key head use the mean of their r.

``V⁰`` belongs to one forward, in one thread, of the modules around the stack: the first filter
keeps it in a :class:`FirstValues` that the filters of a stack share, the others read it, and it is
gone when the forward ends or raises. Layers that are called outside of such a forward have no V⁰.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn


class _Current(threading.local):
    """V⁰ of the forward that this thread runs."""

    def __init__(self) -> None:
        self.values: Tensor | None = None
        # the running modules around the stack, by id. A set and not their number: torch calls no
        # hook after a forward that Ctrl-C ended, and the next one must set it right
        self.around: set[int] = set()
        # whether any is running; compiled layers read this alone, and are not compiled for each id
        self.running = False


class FirstValues:
    """V⁰ of a stack of filtered layers, from the first layer to the others of the same forward.

    Gradient checkpointing runs a layer again during the backward pass, when other forwards may
    have run since. It finds the V⁰ of its own forward by a few of the layer's values.
    """

    def __init__(self) -> None:
        self.current = _Current()
        # V⁰ of forwards whose gradient is still to come, by id, and a few values of each layer
        self._awaited: dict[int, tuple[weakref.ref[Tensor], dict[int, Tensor]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> FirstValues:
        # a filter that is copied alone takes the place of the original in its stack: peft copies
        # those that it trains
        outermost = next(iter(memo.values()), None)
        return self if hasattr(type(outermost), "first_values") else FirstValues()

    def __reduce__(self) -> tuple[type[FirstValues], tuple[()]]:
        return FirstValues, ()

    def keep(self, v: Tensor) -> None:
        """Called by the first layer of a forward."""
        if self.current.running and not _is_recomputed():
            if self.current.values is not None:
                raise ValueError(
                    "the depth term adds the values of the first filtered layer, which has run "
                    "twice in this forward: plug a model that runs its layers again (ALBERT, "
                    "looped models) without depth=True"
                )
            self.current.values = v

    def __call__(self, module: nn.Module, args: Any, *output: Any) -> None:
        """Before and after a forward of a module around the stack."""
        if not _is_recomputed():
            current = self.current
            (current.around.discard if output else current.around.add)(id(module))
            current.running = bool(current.around)
            current.values = None

    def add(self, v: Tensor, r: Tensor, layer: int) -> Tensor:
        """``v + r·V⁰`` for the layers above, which have a number ``layer`` each.

        v is ``(..., H, N, D)``, where H counts key heads, and r ``(query heads,)``.
        """
        recomputed = _is_recomputed()
        first = self._of_graph(v, layer) if recomputed else self.current.values
        if first is None:
            raise ValueError(
                "the depth term needs the values of the first filtered layer, which has not run in "
                "this forward and thread: call the model itself, or plug a wrapper whose forward "
                "calls another entry point. LayerDrop, pipeline stages and checkpointing around "
                "compiled layers need plug without depth=True"
            )
        if first.shape != v.shape:
            raise ValueError(
                "the depth term adds the values of the first filtered layer, of shape "
                f"{tuple(first.shape)}, to values of shape {tuple(v.shape)}: leave layers of other "
                "heads or head dims out with plug(..., layers=...)"
            )
        heads = v.shape[-3]
        if r.shape[0] != heads:
            r = r.view(heads, -1).mean(-1)
        mixed = torch.addcmul(v, r[:, None, None], first).to(v.dtype)
        if torch.is_grad_enabled() and not (recomputed or torch.compiler.is_compiling()):
            self._await(first, mixed, v, layer)
        return mixed

    def _await(self, first: Tensor, mixed: Tensor, v: Tensor, layer: int) -> None:
        """Remember V⁰ until its gradient has come, or the graph is gone."""
        node: Any = mixed.grad_fn
        if node is not None:
            # under checkpointing the graph saves no tensors, and would let go of V⁰
            node.metadata["gfsa_first_values"] = first
        key = id(first)

        def forget(_: Any) -> None:
            self._awaited.pop(key, None)

        if key not in self._awaited:
            self._awaited[key] = weakref.ref(first, forget), {}
            if first.requires_grad:
                first.register_hook(forget)
        self._awaited[key][1][layer] = _some_of(v)

    def _of_graph(self, v: Tensor, layer: int) -> Tensor:
        """V⁰ of the forward that is run again."""
        fitting = [
            first
            for reference, seen in [*self._awaited.values()]
            if (first := reference()) is not None
            and layer in seen
            and torch.equal(seen[layer], _some_of(v))
        ]
        if not fitting or not all(torch.equal(first, fitting[0]) for first in fitting[1:]):
            waiting = "several with other first values wait" if fitting else "none waits"
            raise ValueError(
                "the depth term cannot be recomputed by gradient checkpointing here: expected one "
                f"forward with these values that waits for its backward pass, but {waiting}. Pass "
                "use_reentrant=False, and call backward after each forward"
            )
        return fitting[0]


def _some_of(v: Tensor) -> Tensor:
    # of every token: those of a last document or window are the same in other forwards; NaN would
    # differ from itself
    return v.detach()[..., 0].nan_to_num()


def _is_recomputed() -> bool:
    """Whether this runs inside a backward pass, as gradient checkpointing does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
