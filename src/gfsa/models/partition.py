"""Cut a graph into patches of about equal size that hang together."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

Partition = Callable[[Tensor, int, int], Tensor]
"""``(edge_index, num_nodes, num_parts) -> (num_nodes,)``: the part of each node, counted from 0."""


def bisection(edge_index: Tensor, num_nodes: int, num_parts: int) -> Tensor:
    """Halve the graph, then its halves, each time growing one half from a node at the rim.

    Deterministic, and needs nothing but Python. Parts differ by at most a few nodes in size; a
    graph of no more nodes than parts gives each node a part of its own.
    """
    neighbours: list[list[int]] = [[] for _ in range(num_nodes)]
    for a, b in edge_index.T.tolist():
        neighbours[a].append(b)
        neighbours[b].append(a)
    part = [0] * num_nodes
    waiting = [(list(range(num_nodes)), 0, min(num_parts, num_nodes))]
    while waiting:
        nodes, label, parts = waiting.pop()
        if parts == 1:
            for node in nodes:
                part[node] = label
            continue
        half = parts // 2
        order = _from_the_rim(nodes, neighbours)
        # both halves keep at least a node for each of their parts
        size = max(half, min(round(len(nodes) * half / parts), len(nodes) - (parts - half)))
        waiting.append((order[:size], label, half))
        waiting.append((order[size:], label + half, parts - half))
    return torch.tensor(part, dtype=torch.long)


def metis(edge_index: Tensor, num_nodes: int, num_parts: int) -> Tensor:
    """METIS through the package ``pymetis``: the smallest cut, as Graph-ViT's authors take it."""
    try:
        pymetis = importlib.import_module("pymetis")
    except ImportError as error:
        raise ImportError(
            "partition=metis needs the package pymetis (pip install pymetis); "
            "partition=bisection needs none"
        ) from error
    if num_nodes <= num_parts:
        return torch.arange(num_nodes)
    neighbours: list[set[int]] = [set() for _ in range(num_nodes)]
    for a, b in edge_index.T.tolist():
        if a != b:
            neighbours[a].add(b)
            neighbours[b].add(a)
    _, part = pymetis.part_graph(num_parts, adjacency=[sorted(n) for n in neighbours])
    # parts that METIS left empty are not there
    return torch.unique(torch.tensor(part), return_inverse=True)[1]


def _from_the_rim(nodes: list[int], neighbours: list[list[int]]) -> list[int]:
    """The nodes in breadth-first order from one that is far from the others."""
    return _breadth_first(nodes, _breadth_first(nodes, nodes[0], neighbours)[-1], neighbours)


def _breadth_first(nodes: list[int], start: int, neighbours: list[list[int]]) -> list[int]:
    unseen = dict.fromkeys(nodes)
    order: list[int] = []
    queue: deque[int] = deque()
    while unseen:
        # another component, if the first one is done
        first = start if start in unseen else next(iter(unseen))
        del unseen[first]
        queue.append(first)
        while queue:
            node = queue.popleft()
            order.append(node)
            for other in neighbours[node]:
                if other in unseen:
                    del unseen[other]
                    queue.append(other)
    return order
