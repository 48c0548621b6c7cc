"""Times of the kernel for a decoded token, by tiles and by programs that share a head, on a GPU.

    python benchmarks/decode_splits.py 1x12x1024x64 16x12x1024x64

A captured graph decodes one token with each of twelve caches, more than the GPU's L2 cache holds,
because a model reads its weights in between. Times are those of one call: by torch's attention
(plain, without a filter) with a growing and with a static cache, then by the kernel for each tile
(keys, warps, stages) and number of programs, for filters of degree 1 and 2. The fastest go into
``tile_of`` and ``_splits`` of ``kernels/decode.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from torch.nn import functional as F

from gfsa.kernels import decode
from gfsa.kernels.decode import Tile
from gfsa.operators import Coefficients
from gfsa_benchmarks.case import Shape
from gfsa_benchmarks.tiles import Candidate, compiled, report, run, times
from gfsa_benchmarks.timing import Work

CACHES = 12
# keys, warps, stages; a thread's registers for sums: keys·dim / (16·warps)
TILES = [
    *(Tile(16, 2, 3), Tile(16, 4, 3), Tile(32, 4, 3), Tile(32, 4, 4), Tile(32, 8, 3)),
    *(Tile(32, 4, 5), Tile(64, 4, 3), Tile(64, 8, 3), Tile(64, 8, 4)),
]
SPLITS = (1, 2, 4, 8, 16, 32)
DEGREES = (1, 2)
# fewer leave processors of the GPU without any
FEWEST_PROGRAMS = 96


class Bench:
    """One new token with each of some filled caches, by a filter of some degree."""

    def __init__(self, shape: Shape, device: str, caches: int = CACHES, degree: int = 2) -> None:
        size = (shape.batch, shape.heads, shape.tokens, shape.dim)
        make = {"device": device, "dtype": torch.bfloat16}
        self.shape = shape
        self.caches: list[list[torch.Tensor | None]] = [
            # keys, values and A·V, of which degree 1 has none
            [torch.randn(size, **make) if i <= degree else None for i in range(3)]
            for _ in range(caches)
        ]
        self.q = torch.randn((*size[:2], 1, shape.dim), **make)
        # a static cache whose last row is the newest token's
        self.mask = torch.ones(shape.batch, 1, 1, shape.tokens, dtype=torch.bool, device=device)
        self.length = torch.tensor(shape.tokens, device=device)
        self.counters = decode.new_counters(shape.batch * shape.heads, self.q.device)
        powers = degree + 1
        sizes = ((shape.heads, powers), (shape.heads, powers), (powers, powers))
        self.coeffs = Coefficients(*(torch.rand(size).to(device) for size in sizes))

    def plain(self, static: bool) -> Work:
        mask = self.mask if static else None

        def work() -> list[torch.Tensor]:
            return [F.scaled_dot_product_attention(self.q, k, v, mask) for k, v, _ in self.caches]

        return work

    def kernel(self, tile: Tile, splits: int, static: bool) -> Work:
        given = (self.mask, self.length) if static else (None, None)
        others = (self.coeffs, *given, self.shape.dim**-0.5, self.counters)

        def work() -> list[torch.Tensor]:
            with (
                mock.patch.object(decode, "tile_of", return_value=tile),
                mock.patch.object(decode, "_splits", return_value=splits),
            ):
                return [decode.decode(self.q, *cache, *others) for cache in self.caches]

        return work

    def present(self) -> tuple[Tile, int]:
        shape = self.shape
        tile = decode.tile_of(decode.padded(shape.dim))
        heads, tiles = shape.batch * shape.heads, -(-shape.tokens // tile.keys)
        return tile, decode._splits(heads, tiles, self.q.device.index)

    def candidates(self) -> Iterator[tuple[Tile, int]]:
        """Tiles and programs that fill the GPU, with a tile for each program."""
        shape = self.shape
        for tile in TILES:
            for splits in SPLITS:
                programs = shape.batch * shape.heads * splits
                if splits * tile.keys <= shape.tokens and programs >= FEWEST_PROGRAMS:
                    yield tile, splits

    def ways(self, tiles: Sequence[Tile] = TILES) -> list[Candidate]:
        """The kernel with each of the candidates that have one of these tiles."""
        return [
            Candidate(
                f"{tuple(tile)} x{splits}{' now' if (tile, splits) == self.present() else ''}",
                functools.partial(self.kernel, tile, splits, static=True),
            )
            for tile, splits in self.candidates()
            if tile in tiles
        ]


def cases(shape: Shape) -> list[tuple[Shape, Tile, int]]:
    return [(shape, tile, degree) for degree in DEGREES for tile in TILES]


def compile_case(case: tuple[Shape, Tile, int]) -> None:
    shape, tile, degree = case
    bench = Bench(shape, "cuda", caches=1, degree=degree)
    compiled(bench.ways([tile]), f"{shape} degree {degree}")


def measure(shape: Shape, rounds: int) -> None:
    for degree in DEGREES:
        measure_degree(shape, rounds, degree)


def measure_degree(shape: Shape, rounds: int, degree: int) -> None:
    bench, heading = Bench(shape, "cuda", degree=degree), f"{shape} degree {degree}"
    tile, splits = bench.present()
    first = [
        Candidate("plain, growing", functools.partial(bench.plain, False)),
        Candidate("plain, static", functools.partial(bench.plain, True)),
        Candidate(
            f"{tuple(tile)} x{splits} now, growing",
            functools.partial(bench.kernel, tile, splits, static=False),
        ),
    ]
    rows = times([*first, *bench.ways()], heading, rounds, calls=CACHES)
    ranked = sorted(rows[len(first) :], key=lambda row: row[1])
    report([*rows[: len(first)], *ranked], heading, reference=rows[1][1])


if __name__ == "__main__":
    run(__doc__, cases, compile_case, measure)
