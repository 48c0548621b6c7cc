"""Times of the long kernels by the sizes of their tiles, on a GPU.

    python benchmarks/packed_tiles.py 4x16x8192x64 4x16x8192x128

Rows are packed documents as in ``gfsa bench --suite packed``; the first line of each kernel is what
it takes on causal rows of equal work with the present sizes. The fastest ones go into
``operators/fused/long/tile_sizes.py``.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from gfsa.operators import Visibility
from gfsa.operators.fused.long import launch
from gfsa.operators.fused.long.tile_sizes import Tiles, tiles
from gfsa.operators.fused.problem import SPANS, Options, pointers, problem_of
from gfsa_benchmarks.case import Shape
from gfsa_benchmarks.packed import document_lengths, equal_rows
from gfsa_benchmarks.timing import interleaved

WORKERS = 10
ROUNDS = 5
# rows, columns, warps, stages
FORWARD = [(64, 64, 4, 3), (64, 32, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2)]
BACKWARD = [(64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (128, 32, 8, 2), (128, 64, 8, 2)]
CANDIDATES = {
    "attend": [*FORWARD, (64, 128, 4, 2)],
    "combine": [*FORWARD, (64, 64, 4, 2)],
    "grad_first_pass": [*FORWARD, (64, 64, 4, 2), (64, 32, 4, 3), (128, 32, 8, 3)],
    "grad_keys": [*BACKWARD, (64, 32, 4, 3), (64, 16, 4, 3)],
    "grad_queries": [*BACKWARD, (64, 64, 4, 3), (64, 32, 4, 3)],
}


class Bench:
    """The tensors of one call, and each kernel on them."""

    def __init__(self, batch: int, shape: Shape, length: int, spans: Tensor | None) -> None:
        size = (batch, shape.heads, length, shape.dim)
        q, k, v, g, u, out, du, dq, dk, dv = (
            torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(10)
        )
        lse, delta = (torch.zeros(size[:3], device="cuda") for _ in range(2))
        coeffs = torch.full((shape.heads, 3), 0.3, device="cuda")
        dc = torch.empty(shape.heads * 3 * batch * (length // 16 + 1), device="cuda")
        extra = pointers(spans, None, unused=q)
        self.problem = problem_of(q, k, spans, Options(shape.dim**-0.5, True))
        self.arguments = {
            "attend": ((q, k, v, u), lse, *extra),
            "combine": ((q, k, u, u, v, out), lse, coeffs, *extra),
            "grad_first_pass": ((q, k, g, g, v, u, out, du), delta, dc, lse, coeffs, *extra),
            "grad_keys": ((q, k, v, u, g, g, du, dk, dv), delta, lse, coeffs, *extra),
            "grad_queries": ((q, k, v, u, g, du, dq), delta, lse, coeffs, *extra),
        }
        # logsumexps and the like as they are in a real call
        for name in self.arguments:
            self.work(name, self.present(name))()

    def present(self, name: str) -> Tiles:
        packed = self.problem.mask_kind == SPANS
        return tiles(name, self.problem.head_dim, self.problem.length, True, False, packed)

    def work(self, name: str, cut: Tiles) -> Callable[[], None]:
        with mock.patch.object(launch, "tiles", return_value=cut):
            ready = launch._launch(name, self.problem)
        return functools.partial(ready, *self.arguments[name])  # type: ignore[arg-type]


def packed_bench(shape: Shape) -> tuple[Bench, list[list[int]]]:
    documents = [document_lengths(shape.tokens, row) for row in range(shape.batch)]
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in documents]
    visible = Visibility(causal=True, documents=torch.stack(rows)[:, None].cuda(), in_order=True)
    spans = visible.spans(shape.tokens, torch.device("cuda"))
    return Bench(shape.batch, shape, shape.tokens, spans), documents


def compile_all(case: tuple[str, str]) -> None:
    """Fill Triton's cache on disk with one kernel's candidates."""
    text, name = case
    bench, _ = packed_bench(Shape.parse(text))
    for cut in CANDIDATES[name]:
        try:
            bench.work(name, Tiles(*cut))()
        except Exception as error:
            # measure() meets it again and says which candidate is left out
            print(f"{text} {name} {cut} does not run: {error!r}"[:300], flush=True)


def measure(text: str) -> None:
    shape = Shape.parse(text)
    bench, documents = packed_bench(shape)
    causal = Bench(*_equal(documents, shape))
    for name, cuts in CANDIDATES.items():
        works, labels = [causal.work(name, causal.present(name))], ["causal rows"]
        for cut in cuts:
            work = bench.work(name, Tiles(*cut))
            try:
                work()
            except Exception as error:
                # most often too large for the GPU's shared memory
                print(f"{text} {name:16} {cut!s:22} left out: {type(error).__name__}", flush=True)
                continue
            works.append(work)
            labels.append(f"{cut}{' now' if Tiles(*cut) == bench.present(name) else ''}")
        times = interleaved(works, ROUNDS, torch.device("cuda"))
        for label, time in zip(labels, times, strict=True):
            against = time.median / times[0].median
            print(f"{text} {name:16} {label:22} {time.median:8.4f} ms {against:5.2f}", flush=True)


def _equal(documents: list[list[int]], shape: Shape) -> tuple[int, Shape, int, None]:
    batch, length = equal_rows(documents)
    return batch, shape, length, None


def main(texts: list[str]) -> None:
    cases = [(text, name) for text in texts for name in CANDIDATES]
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        pool.map(compile_all, cases, chunksize=1)
    for text in texts:
        measure(text)


if __name__ == "__main__":
    main(sys.argv[1:])
