"""Tile sizes of the long kernels: the fastest measured on an H200."""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """How one kernel cuts its work."""

    rows: int
    """Rows that a program owns."""
    cols: int
    """Rows of the other side that it takes at a time."""
    warps: int
    stages: int
    """Depth of the load pipeline."""


# by kernel, then by the largest head dim that an entry serves
TILES: dict[str, dict[int, Tiles]] = {
    "attend": {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 3)},
    "combine": {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 3)},
    "grad_first_pass": {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 3)},
    "grad_keys": {64: Tiles(64, 64, 4, 2), 128: Tiles(128, 64, 8, 2)},
    "grad_queries": {64: Tiles(64, 64, 4, 2), 128: Tiles(128, 64, 8, 2)},
}

# narrower steps where half of them are masked
CAUSAL = {"grad_keys": Tiles(64, 32, 4, 2), "grad_first_pass": Tiles(64, 64, 4, 2)}

# documents and windows: less of a narrow tile is hidden at their borders
PACKED = {
    ("grad_keys", 128): Tiles(64, 32, 4, 3),
    ("grad_queries", 64): Tiles(64, 32, 4, 3),
    ("grad_queries", 128): Tiles(64, 32, 4, 3),
}

# taller tiles where every row sees every key, from this length on
TALL = Tiles(128, 64, 4, 3)
TALL_FROM = {"combine": 2048, "grad_first_pass": 192}


def tiles(
    kernel: str, head_dim: int, length: int, is_causal: bool, dropout: bool, packed: bool = False
) -> Tiles:
    """The tiles of ``kernel`` for one call; ``packed`` if there are documents or a window."""
    limit = 64 if head_dim <= 64 else 128
    if packed and (kernel, limit) in PACKED:
        return PACKED[kernel, limit]
    tall = length >= TALL_FROM.get(kernel, length + 1) and not (is_causal or dropout)
    if tall and head_dim <= 64:
        return TALL
    if is_causal and head_dim <= 64 and kernel in CAUSAL:
        return CAUSAL[kernel]
    entries = TILES[kernel]
    return entries[min(limit for limit in entries if limit >= head_dim)]
