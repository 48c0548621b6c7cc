"""The plan of the causal sweep with spans, block by block."""

from __future__ import annotations

import itertools

import numpy as np

ROWS, HALF = 128, 64
NUMBERS = 9


def edges_of(spans: np.ndarray, rows: int = ROWS) -> list[int]:
    """The first tokens of one row's documents that are at least as long as a block.

    If documents are out of order a window may have several, of which the last one counts.
    """
    first, last = spans
    i = np.arange(len(first))
    found = i[(first == i) & (last - i >= rows - 1)]
    return sorted({int(edge) // rows: int(edge) for edge in found if edge}.values())


def blocks_of(
    spans: np.ndarray, rows: int = ROWS, slots: int | None = None
) -> list[tuple[int, int, int]]:
    """Origin, beginning and end of each block of ``rows`` of one row, or of less.

    Args:
        slots: as many blocks at most, or any number.
    """
    n = spans.shape[1]
    most = n if slots is None else slots - -(-n // rows)
    origins = [0, *edges_of(spans, rows)[:most], n]
    return [
        (origin, start, min(start + rows, end))
        for origin, end in itertools.pairwise(origins)
        for start in range(origin, end, rows)
    ]


def plan_of(spans: np.ndarray, parts: int) -> np.ndarray:
    """``(slots, 2, NUMBERS)`` of one row; -1 where nothing is planned."""
    first, last = spans
    n, tile = len(first), parts * HALF
    windows = -(-n // ROWS)
    blocks = blocks_of(spans)
    middle = max([0, *(edge for edge in edges_of(spans) if edge < (windows // 2 + 1) * ROWS)])
    halves: list[dict[int, list[tuple[int, int, int]]]] = [
        {window: [] for window in range(middle // ROWS + 1)},
        {window: [] for window in range(middle // ROWS, windows)},
    ]
    for origin, start, end in blocks:
        # without an edge near the middle, the first block alone is the first half
        upper = start >= middle if middle else start >= ROWS
        halves[upper][start // ROWS].append((origin, start, end))
    queues = [list(half.values()) for half in halves]
    slots = []
    while any(queues):
        slots += [queue.pop(0) for queue in queues if queue]
    plan = np.full((len(slots), 2, NUMBERS), -1)
    plan[..., 2] = 0
    for planned, slot in zip(plan, slots, strict=True):
        for origin, start, end in slot:
            numbers = planned[0 if start == origin and origin else 1]
            numbers[:3] = origin, (start - origin) // ROWS, end - origin
            for half in range(2):
                row = start + half * HALF
                diagonal = origin + (row - origin) // tile * tile
                begin = max(0, first[min(row, end - 1)] - origin) // tile
                numbers[3 + half] = max(begin, numbers[3])
                before = max(min(diagonal, end) - 1, origin)
                seeing = min(last[before], min(row + HALF, end) - 1)
                numbers[5 + half] = first[seeing] - origin if seeing >= row else 0
                numbers[7 + half] = first[min(row + HALF, end) - 1] - origin
    return plan
