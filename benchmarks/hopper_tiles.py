"""Times of the Hopper kernels' gradient: each kernel by the sizes of its tiles, then whole calls.

    python benchmarks/hopper_tiles.py 64x8x1024x64:causal 8x32/8x2048x128:causal

``32/8`` are 32 query heads and 8 heads of keys and values. All times are replays of CUDA graphs;
whole calls are forward and backward, by turns: torch's attention, the filter with the gradient by
the Hopper kernels (with equal bits in every run, too, where that is another way), by the long
kernels, and by cuDNN's where that serves. The fastest tiles go into
``kernels/hopper/backward_path.py``.
"""

from __future__ import annotations

import functools
import math
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.kernels.dispatch import Path
from gfsa.kernels.hopper import backward_path as hopper
from gfsa.kernels.hopper.backward_path import Tiles
from gfsa.kernels.long import cudnn_backward
from gfsa.kernels.long import launch as long
from gfsa.kernels.problem import Options, Saved, problem_of
from gfsa_benchmarks.case import Shape
from gfsa_benchmarks.tiles import Candidate, compiled, report, run, times
from gfsa_benchmarks.timing import Work

CANDIDATES = {
    64: {
        "grad_first_pass": (Tiles(64, 64), Tiles(128, 64)),
        "grad_keys": (Tiles(64, 64), Tiles(64, 32), Tiles(128, 64)),
        "grad_queries": (Tiles(64, 64), Tiles(64, 32), Tiles(128, 64)),
    },
    128: {
        "grad_first_pass": (Tiles(64, 64), Tiles(128, 64)),
        "grad_keys": (Tiles(128, 64), Tiles(64, 32)),
        "grad_queries": (Tiles(128, 64), Tiles(64, 32)),
    },
}


class Call:
    """The tensors of one call, and what can be timed on them."""

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        if shape.padded or shape.tokens % 4 or shape.dim > 128:
            raise ValueError(
                "expected a shape without padding, of tokens that are a multiple of 4 and a head "
                f"dim up to 128, got {shape}"
            )
        batch, heads, length, dim = shape.batch, shape.heads, shape.tokens, shape.dim
        key_heads = shape.key_heads or heads
        self.options = Options(dim**-0.5, shape.causal)
        self.device = device
        self.q, self.g = (self._randn(batch, heads, length, dim) for _ in range(2))
        self.k, self.v = (self._randn(batch, key_heads, length, dim) for _ in range(2))
        self.coeffs = torch.randn(heads, 3, device=device)
        self.problem = problem_of(self.q, self.k, None, self.options)
        self.width = max(64, 1 << (dim - 1).bit_length())
        out, u, lse = self._forward()
        # as the gradient takes them
        lse = hopper.copyable_by_row(lse)
        self.saved = Saved(self.q, self.k, self.v, u, out, lse, self.coeffs)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def _forward(self) -> tuple[Tensor, Tensor, Tensor]:
        return long.forward(self.q, self.k, self.v, self.coeffs, None, None, self.options)

    def kernel(self, name: str, tiles: Tiles) -> Work:
        """One kernel; queries stand in for the mask, which is not read."""
        own = (False,) if name == "grad_keys" else ()
        with mock.patch.dict(hopper.TILES, {name: {self.width: tiles}}):
            launch = hopper._launch(name, self.problem, *own)
        q, k, v, u, out, lse, coeffs, *_ = self.saved
        g, du, delta = self.g, torch.randn_like(q), torch.randn_like(lse)
        dq, dk, dv = (torch.empty_like(q) for _ in range(3))
        rows, deltas = hopper.as_tiles(lse), hopper.as_tiles(delta)
        if name == "grad_first_pass":
            parts = lse.new_empty(q.shape[1], 3, math.prod(launch.grid) // q.shape[1])
            return lambda: launch((q, g, rows, k, g, v, u, out, du), delta, parts, coeffs, q)
        if name == "grad_keys":
            return lambda: launch((q, g, du, rows, deltas, k, v, u, g, dk, dv), coeffs, q, coeffs)
        return lambda: launch((k, v, u, q, g, du, dq), delta, lse, coeffs, q)

    def plain(self) -> object:
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.options.is_causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        return torch.autograd.grad(y, (q, k, v), self.g)

    def whole(self, path: Path) -> Work:
        def work() -> object:
            out, u, lse = self._forward()
            saved = Saved(self.q, self.k, self.v, u, out, lse, self.coeffs)
            return path.backward(self.g, saved, self.options)

        return work

    def with_equal_bits(self) -> Work:
        work = self.whole(hopper)

        def deterministic() -> object:
            with mock.patch.object(hopper, "adds_up_queries", return_value=False):
                return work()

        return deterministic

    def paths(self) -> dict[str, Path]:
        paths: dict[str, Path] = {"Hopper kernels": hopper, "long kernels": long}
        if cudnn_backward.serves(self.q, self.k, self.v, None, self.options):
            paths["cuDNN"] = cudnn_backward
        return paths

    def candidates(self, name: str) -> list[Candidate]:
        present = hopper.TILES[name][self.width]
        return [
            Candidate(
                f"{tiles.rows}x{tiles.cols}, {tiles.warps} warps{' now' * (tiles == present)}",
                functools.partial(self.kernel, name, tiles),
            )
            for tiles in CANDIDATES[self.width][name]
        ]

    def whole_calls(self) -> list[Candidate]:
        paths = self.paths().items()
        by_path = [Candidate(label, functools.partial(self.whole, path)) for label, path in paths]
        if hopper.adds_up_queries(self.problem):
            by_path.append(Candidate("Hopper kernels, equal bits", self.with_equal_bits))
        return [Candidate("plain", lambda: self.plain), *by_path]


WHOLE = "whole calls"


def cases(shape: Shape) -> list[tuple[Shape, str]]:
    return [(shape, name) for name in (*hopper.TILES, WHOLE)]


def compile_case(case: tuple[Shape, str]) -> None:
    shape, name = case
    call = Call(shape)
    compiled(call.whole_calls() if name == WHOLE else call.candidates(name), f"{shape} {name}")


def measure(shape: Shape, rounds: int) -> None:
    call = Call(shape)
    for name in hopper.TILES:
        heading = f"{shape} {name}"
        rows = times(call.candidates(name), heading, rounds)
        now = next((taken for label, taken in rows if label.endswith(" now")), rows[0][1])
        report(rows, heading, reference=now)
    heading = f"{shape} {WHOLE}"
    rows = times(call.whole_calls(), heading, rounds)
    report(rows, heading, reference=rows[0][1])


if __name__ == "__main__":
    run(__doc__, cases, compile_case, measure)
