"""Times of the Hopper kernels' gradient: each kernel by the sizes of its tiles, then whole calls.

    python benchmarks/hopper_tiles.py 64x8x1024x64:causal 8x32/8x2048x128:causal

``32/8`` are 32 query heads and 8 heads of keys and values. All times are replays of CUDA graphs;
whole calls are forward and backward, by turns: torch's attention, the filter with the gradient by
the Hopper kernels (dQ, dK and dV from one kernel where that serves, and from two), by the long
kernels, and by cuDNN's where that serves. The fastest tiles go into
``operators/fused/hopper/backward_path.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.operators.fused.dispatch import Path
from gfsa.operators.fused.hopper import backward_path as hopper
from gfsa.operators.fused.hopper import tokens_path
from gfsa.operators.fused.hopper.backward_path import Tiles
from gfsa.operators.fused.hopper.descriptors import as_tiles
from gfsa.operators.fused.long import cudnn_backward
from gfsa.operators.fused.long import launch as long
from gfsa.operators.fused.problem import Options, Saved, problem_of
from gfsa_benchmarks.case import Shape
from gfsa_benchmarks.timing import captured, interleaved

ROUNDS = 5
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
Work = Callable[[], object]


class Call:
    """The tensors of one call, and what can be timed on them."""

    def __init__(self, text: str) -> None:
        shape = Shape.parse(text)
        if shape.padded:
            raise ValueError(f"expected a shape without padding, got {text!r}")
        batch, heads, length, dim = shape.batch, shape.heads, shape.tokens, shape.dim
        key_heads = shape.key_heads or heads
        self.options = Options(dim**-0.5, shape.causal)
        self.q, self.g = (self._randn(batch, heads, length, dim) for _ in range(2))
        self.k, self.v = (self._randn(batch, key_heads, length, dim) for _ in range(2))
        self.coeffs = torch.randn(heads, 3, device="cuda")
        self.problem = problem_of(self.q, self.k, None, self.options)
        self.width = max(64, 1 << (dim - 1).bit_length())
        out, u, lse = self._forward()
        self.saved = Saved(self.q, self.k, self.v, u, out, lse, self.coeffs)

    @staticmethod
    def _randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def _forward(self) -> tuple[Tensor, Tensor, Tensor]:
        return long.forward(self.q, self.k, self.v, self.coeffs, None, None, self.options)

    def kernel(self, name: str, tiles: Tiles) -> Work:
        """One kernel; queries stand in for the mask, which is not read."""
        with mock.patch.dict(hopper.TILES, {name: {self.width: tiles}}):
            launch = hopper._launch(name, self.problem)
        q, k, v, u, out, lse, coeffs, *_ = self.saved
        g, du, delta = self.g, torch.randn_like(q), torch.randn_like(lse)
        dq, dk, dv = (torch.empty_like(q) for _ in range(3))
        rows, deltas = as_tiles(lse), as_tiles(delta)
        if name == "grad_first_pass":
            parts = lse.new_empty(q.shape[1], 3, q.shape[0] * launch.grid[0])
            return lambda: launch((q, g, rows, k, g, v, u, out, du), delta, parts, coeffs, q)
        if name == "grad_keys":
            return lambda: launch((q, g, du, rows, deltas, k, v, u, g, dk, dv), coeffs, q)
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

    def paths(self) -> dict[str, Path]:
        paths: dict[str, Path] = {"Hopper kernels": hopper, "long kernels": long}
        if cudnn_backward.serves(self.q, self.k, self.v, None, self.options):
            paths["cuDNN"] = cudnn_backward
        return paths


def measure(text: str) -> None:
    call = Call(text)
    for name, candidates in CANDIDATES[call.width].items():
        works = [captured(call.kernel(name, tiles)) for tiles in candidates]
        times = interleaved(works, ROUNDS, torch.device("cuda"))
        for tiles, time in zip(candidates, times, strict=True):
            now = " now" if tiles == hopper.TILES[name][call.width] else ""
            cut = f"{tiles.rows}x{tiles.cols}, {tiles.warps} warps"
            print(f"{text} {name} {cut}: {time.median:.4f} ms{now}", flush=True)
    works = {label: captured(call.whole(path)) for label, path in call.paths().items()}
    if tokens_path.serves(call.problem):
        with mock.patch.object(tokens_path, "serves", return_value=False):
            works["dQ by a kernel of its own"] = captured(call.whole(hopper))
    timed = [captured(call.plain), *works.values()]
    plain, *times = interleaved(timed, ROUNDS, torch.device("cuda"))
    ratios = zip(works, [time.median / plain.median for time in times], strict=True)
    line = [f"{label} {ratio:.3f}" for label, ratio in ratios]
    print(f"{text} whole calls: plain {plain.median:.4f} ms, {', '.join(line)}", flush=True)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        measure(each)
