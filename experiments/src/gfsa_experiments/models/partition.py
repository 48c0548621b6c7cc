"""Partition a graph into connected patches of about equal size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

Partition = Callable[[Tensor, int, int], Tensor]
"""``(edge_index, num_nodes, num_parts) -> (num_nodes,)``: the part of each node, counted from 0."""


def bisection(edge_index: Tensor, num_nodes: int, num_parts: int) -> Tensor:
    """Halve the graph, then its halves, each time where few edges cross.

    Deterministic, in plain Python. The size of most parts is within half of the mean; if there are
    no more nodes than parts, each node is a part. Meant for graphs that are nearly trees, such as
    molecules.
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
        order = _branch_by_branch(nodes, neighbours)
        size = _fewest_crossings(order, neighbours, parts)
        waiting.append((order[:size], label, parts // 2))
        waiting.append((order[size:], label + parts // 2, parts - parts // 2))
    return torch.tensor(part, dtype=torch.long)


def metis(edge_index: Tensor, num_nodes: int, num_parts: int) -> Tensor:
    """METIS through the package ``pymetis``: the smallest cut, as in Graph-ViT's own code."""
    try:
        import pymetis
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
    # parts that METIS left empty are removed
    return torch.unique(torch.tensor(part), return_inverse=True)[1]


def _branch_by_branch(nodes: list[int], neighbours: list[list[int]]) -> list[int]:
    """Depth first from a peripheral node, small branches first: connected nodes are adjacent."""
    far = _breadth_first(nodes, nodes[0], neighbours)[0][-1]
    found, parent = _breadth_first(nodes, far, neighbours)
    weight = dict.fromkeys(found, 1)
    children: dict[int, list[int]] = {node: [] for node in found}
    roots = []
    for node in reversed(found):
        if node in parent:
            weight[parent[node]] += weight[node]
            children[parent[node]].append(node)
        else:
            roots.append(node)
    order = []
    stack = roots
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(sorted(children[node], key=lambda child: -weight[child]))
    return order


def _breadth_first(
    nodes: list[int], start: int, neighbours: list[list[int]]
) -> tuple[list[int], dict[int, int]]:
    """The nodes in the order in which they are found, and each node's parent.

    The first node of a component has none.
    """
    unseen = dict.fromkeys(nodes)
    found: list[int] = []
    parent: dict[int, int] = {}
    queue: deque[int] = deque()
    while unseen:
        # the next component, once one is finished
        first = start if start in unseen else next(iter(unseen))
        del unseen[first]
        queue.append(first)
        while queue:
            node = queue.popleft()
            found.append(node)
            for other in neighbours[node]:
                if other in unseen:
                    del unseen[other]
                    parent[other] = node
                    queue.append(other)
    return found, parent


def _fewest_crossings(order: list[int], neighbours: list[list[int]], parts: int) -> int:
    """The number of nodes of ``order`` in the first half: near the middle, with few crossings."""
    first, second = parts // 2, parts - parts // 2
    middle = round(len(order) * first / parts)
    # at most half a part off the middle; both halves keep at least a node for each of their parts
    slack = len(order) // parts // 2
    lowest = max(first, middle - slack)
    highest = max(lowest, min(len(order) - second, middle + slack))
    place = {node: position for position, node in enumerate(order)}
    change = [0] * (len(order) + 1)
    for node in order:
        for other in neighbours[node]:
            if place.get(other, -1) > place[node]:
                change[place[node] + 1] += 1
                change[place[other] + 1] -= 1
    crossings = list(accumulate(change))
    return min(range(lowest, highest + 1), key=lambda size: (crossings[size], abs(size - middle)))
