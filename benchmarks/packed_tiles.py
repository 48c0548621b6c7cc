"""Times of the long kernels by the sizes of their tiles, on a GPU.

    python benchmarks/packed_tiles.py 4x16x8192x64 4x16x8192x128

Rows are packed documents as in ``gfsa bench --suite packed``; the first line of each kernel is what
it takes on causal rows of equal work with the present sizes. The fastest ones go into
``kernels/long/tile_sizes.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from gfsa.kernels.long import launch
from gfsa.kernels.long.tile_sizes import Tiles, tiles
from gfsa.kernels.problem import SPANS, Options, pointers, problem_of
from gfsa.operators import Visibility
from gfsa_benchmarks.case import Shape
from gfsa_benchmarks.packed import document_lengths, equal_rows
from gfsa_benchmarks.tiles import Candidate, compiled, report, run, times

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

    def __init__(
        self, batch: int, shape: Shape, length: int, spans: Tensor | None, device: str = "cuda"
    ) -> None:
        size = (batch, shape.heads, length, shape.dim)
        q, k, v, g, u, out, du, dq, dk, dv = (
            torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(10)
        )
        lse, delta = (torch.zeros(size[:3], device=device) for _ in range(2))
        coeffs = torch.full((shape.heads, 3), 0.3, device=device)
        dc = torch.empty(shape.heads * 3 * batch * (length // 16 + 1), device=device)
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


def packed_bench(shape: Shape, device: str = "cuda") -> tuple[Bench, list[list[int]]]:
    documents = [document_lengths(shape.tokens, row) for row in range(shape.batch)]
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in documents]
    visible = Visibility(
        causal=True, documents=torch.stack(rows)[:, None].to(device), in_order=True
    )
    spans = visible.spans(shape.tokens, torch.device(device))
    return Bench(shape.batch, shape, shape.tokens, spans, device), documents


def candidates(bench: Bench, name: str) -> list[Candidate]:
    """A kernel with each of its cuts."""
    return [
        Candidate(
            f"{cut}{' now' if Tiles(*cut) == bench.present(name) else ''}",
            functools.partial(bench.work, name, Tiles(*cut)),
        )
        for cut in CANDIDATES[name]
    ]


def cases(shape: Shape) -> list[tuple[Shape, str]]:
    return [(shape, name) for name in CANDIDATES]


def compile_case(case: tuple[Shape, str]) -> None:
    shape, name = case
    bench, _ = packed_bench(shape)
    compiled(candidates(bench, name), f"{shape} {name}")


def measure(shape: Shape, rounds: int) -> None:
    bench, documents = packed_bench(shape)
    batch, length = equal_rows(documents)
    causal = Bench(batch, shape, length, None)
    for name in CANDIDATES:
        heading = f"{shape} {name:16}"
        present = functools.partial(causal.work, name, causal.present(name))
        rows = times([Candidate("causal rows", present), *candidates(bench, name)], heading, rounds)
        report(rows, heading, reference=rows[0][1])


if __name__ == "__main__":
    run(__doc__, cases, compile_case, measure)
