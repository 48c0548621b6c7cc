"""What a computation costs: graphs that are compiled, the largest tensor, time beside another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counting:
    """A compiler backend that runs a graph as it is and counts how many it was given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


class LargestTensor(TorchDispatchMode):
    """Notes the storage of every result of torch's operations; an expanded view has few bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


def time_ratio(plugged: Callable[[], Any], plain: Callable[[], Any], rounds: int = 15) -> float:
    """The median time of ``plugged`` over that of ``plain``.

    It is the time of this process on the CPU, which other programs do not lengthen by taking turns
    with it. The calls alternate, so that whatever else they slow down, they slow down in both. The
    first call of each is not measured.
    """
    taken: tuple[list[float], list[float]] = ([], [])
    for measured in range(-1, rounds):
        for call, seconds in zip((plugged, plain), taken, strict=True):
            begun = time.process_time()
            call()
            if measured >= 0:
                seconds.append(time.process_time() - begun)
    first, second = map(statistics.median, taken)
    return first / second
