"""CUDA graphs of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Found = TypeVar("Found")


def captured(work: Callable[[], Found]) -> tuple[torch.cuda.CUDAGraph, Found]:
    """``work`` in a graph that is not replayed yet, and where it puts what it gives.

    It runs before, on another stream: what is compiled in its first call is not captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    return graph, found
