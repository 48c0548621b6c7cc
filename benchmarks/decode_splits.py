"""Times of the kernel for a decoded token, by tiles and by programs that share a head, on a GPU.

    python benchmarks/decode_splits.py 1x12x1024x64 16x12x1024x64

A captured graph decodes one token with each of twelve caches, more than the GPU's L2 cache holds,
because a model reads its weights in between. Times are those of one call: by torch's attention
(plain, without a filter) with a growing and with a static cache, then by the kernel for each tile
(keys, warps, stages) and number of programs. The fastest go into ``tile_of`` and ``_splits`` of
``operators/fused/decode.py``.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch.nn import functional as F

from gfsa.operators import Coefficients
from gfsa.operators.fused import decode
from gfsa.operators.fused.decode import Tile
from gfsa_benchmarks.case import Shape
from gfsa_benchmarks.timing import captured, interleaved

WORKERS = 10
ROUNDS = 5
CACHES = 12
# keys, warps, stages; a thread's registers for sums: keys·dim / (16·warps)
TILES = [
    *(Tile(16, 2, 3), Tile(16, 4, 3), Tile(32, 4, 3), Tile(32, 4, 4), Tile(32, 8, 3)),
    *(Tile(64, 4, 3), Tile(64, 8, 3)),
]
SPLITS = (1, 2, 4, 8, 16, 32)
# fewer leave processors of the GPU without any
FEWEST_PROGRAMS = 96
Work = Callable[[], object]


class Bench:
    """One new token with each of some filled caches."""

    def __init__(self, shape: Shape, device: str, caches: int = CACHES) -> None:
        size = (shape.batch, shape.heads, shape.tokens, shape.dim)
        make = {"device": device, "dtype": torch.bfloat16}
        self.shape = shape
        self.caches = [[torch.randn(size, **make) for _ in range(3)] for _ in range(caches)]
        self.q = torch.randn((*size[:2], 1, shape.dim), **make)
        # a static cache whose last row is the newest token's
        self.mask = torch.ones(shape.batch, 1, 1, shape.tokens, dtype=torch.bool, device=device)
        self.length = torch.tensor(shape.tokens, device=device)
        self.held = torch.zeros_like(self.length)
        self.counters = decode.new_counters(shape.batch * shape.heads, self.q.device)
        numbers = (torch.rand(shape.heads, 3), torch.rand(shape.heads, 3), torch.rand(3, 3))
        self.coeffs = Coefficients(*(x.to(device) for x in numbers))

    def plain(self, static: bool) -> Work:
        mask = self.mask if static else None

        def work() -> list[torch.Tensor]:
            return [F.scaled_dot_product_attention(self.q, k, v, mask) for k, v, _ in self.caches]

        return work

    def kernel(self, tile: Tile, splits: int, static: bool) -> Work:
        given = (self.mask, self.length, self.held) if static else (None, None, None)
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


def compile_all(case: tuple[str, Tile]) -> None:
    """Fill Triton's cache on disk with the candidates of one tile."""
    text, tile = case
    bench = Bench(Shape.parse(text), "cuda", caches=1)
    for other, splits in bench.candidates():
        if other == tile:
            try:
                bench.kernel(tile, splits, static=True)()
            except Exception as error:
                # measure() meets it again and says which candidate is left out
                print(f"{text} {tuple(tile)} {splits} does not run: {error!r}"[:300], flush=True)


def measure(text: str) -> None:
    bench = Bench(Shape.parse(text), "cuda")
    tile, splits = bench.present()
    labels = ["plain, growing", "plain, static", f"{tuple(tile)} x{splits} now, growing"]
    works = [bench.plain(False), bench.plain(True), bench.kernel(tile, splits, static=False)]
    for other in bench.candidates():
        now = " now" if other == (tile, splits) else ""
        labels.append(f"{tuple(other[0])} x{other[1]}{now}")
        works.append(bench.kernel(*other, static=True))
    graphs, kept = [], []
    for label, work in zip(labels, works, strict=True):
        try:
            graphs.append(captured(work))
            kept.append(label)
        except Exception as error:
            # most often too large for the GPU's shared memory
            print(f"{text} {label:32} left out: {type(error).__name__}", flush=True)
    times = interleaved(graphs, ROUNDS, torch.device("cuda"))
    rows = [(time.median / CACHES * 1e3, label) for time, label in zip(times, kept, strict=True)]
    for time, label in [*rows[:3], *sorted(rows[3:])]:
        print(f"{text} {label:32} {time:7.2f} µs {time / rows[1][0]:5.2f}", flush=True)


def main(texts: list[str]) -> None:
    cases = [(text, tile) for text in texts for tile in TILES]
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        pool.map(compile_all, cases, chunksize=1)
    for text in texts:
        measure(text)


if __name__ == "__main__":
    main(sys.argv[1:])
