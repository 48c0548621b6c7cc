"""Times the one-pass kernels of degree 1 with different tiles, on the GPU of this machine.

    python benchmarks/degree_one_tiles.py [--shapes 32x12x512x64,8x32/8x1024x64:causal]

For each shape: every kernel alone, those for any GPU with each candidate; both ways to a causal
forward pass; then whole calls, forward and backward in a CUDA graph, by turns: torch's attention,
the filter around it (``degree_one.py``), and the filter in one pass as the library runs it. The
best tiles go into ``degree_one_launch.py``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.kernels import degree_one_launch as one_pass
from gfsa.kernels import eligibility
from gfsa.kernels.degree_one import combine_degree_one
from gfsa.kernels.degree_one_attention import filter_once
from gfsa.kernels.degree_one_launch import Tiles
from gfsa.kernels.hopper import degree_one_path as hopper
from gfsa.kernels.problem import Options

SHAPES = (
    "32x12x256x64,32x12x512x64,8x12x1024x64:causal,8x12x1024x64,32x12x512x64:causal,"
    "32x12x256x64:causal,64x8x1024x64:causal,256x6x197x64"
)
BY_QUERIES = (
    Tiles(64, 64, 4, 2),
    Tiles(64, 64, 4, 3),
    Tiles(64, 128, 4, 2),
    Tiles(128, 64, 4, 2),
    Tiles(128, 64, 8, 2),
    Tiles(128, 128, 8, 2),
)
CANDIDATES = {
    "attend_once": BY_QUERIES,
    "grad_queries_once": BY_QUERIES,
    "grad_keys_once": (
        Tiles(64, 64, 4, 2),
        Tiles(64, 64, 4, 3),
        Tiles(64, 32, 4, 2),
        Tiles(64, 32, 4, 3),
        Tiles(64, 128, 4, 2),
        Tiles(128, 64, 8, 2),
        Tiles(128, 128, 8, 2),
    ),
}


# ways to a causal forward pass: the length from which on it is one sweep
FORWARDS = {"triton": 10**9, "sweep": 1}
CHOSEN = one_pass.tiles
SWEEP_CHOSEN = eligibility.SWEEP_ONCE_FROM


class Call:
    """The tensors of one call, and each kernel's launch."""

    def __init__(self, shape: str) -> None:
        sizes, _, kind = shape.partition(":")
        batch, both, length, head_dim = sizes.split("x")
        heads, _, key_heads = both.partition("/")
        self.options = Options(int(head_dim) ** -0.5, kind == "causal")
        self.q, self.k, self.v, self.g = (
            torch.randn(
                *(int(batch), int(number or heads), int(length), int(head_dim)),
                device="cuda",
                dtype=torch.bfloat16,
            )
            for number in (heads, key_heads, key_heads, heads)
        )
        self.coeffs = torch.tensor([0.1, 0.9], device="cuda").repeat(int(heads), 1)
        self.out, _, self.lse = self.forward()

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        return one_pass.forward(self.q, self.k, self.v, self.coeffs, None, self.options)

    def kernel(self, name: str, cut: Tiles) -> Callable[[], None]:
        use(lambda *_: cut)
        q, k, v, g, out, lse, coeffs = (
            *(self.q, self.k, self.v, self.g, self.out, self.lse, self.coeffs),
        )
        problem = one_pass.problem_of(q, k, None, self.options)
        room, more, delta = torch.empty_like(q), torch.empty_like(q), torch.zeros_like(lse)
        read = {"attend_once": (q, v), "grad_queries_once": (q, v, g, out)}.get(name, (k, v, g))
        launch = one_pass._launch(name, problem, 2, one_pass._strides(*read))
        if name == "attend_once":
            return lambda: launch((k, v, room), *read, delta, coeffs, q)
        if name == "grad_queries_once":
            return lambda: launch((k, v, room), *read, lse, delta, coeffs, q)
        parts = coeffs.new_empty(problem.heads, 2, launch.grid[0] // problem.heads)
        return lambda: launch((q, g, lse, delta, room, more), *read, parts, coeffs, q)

    def hopper_kernel(self, name: str) -> Callable[[], None]:
        q, k, v, g, out, lse, coeffs = (
            *(self.q, self.k, self.v, self.g, self.out, self.lse, self.coeffs),
        )
        problem = one_pass.problem_of(q, k, None, self.options)
        launch = hopper._launch(name, problem, 2)
        room, more, delta = torch.empty_like(q), torch.empty_like(q), torch.zeros_like(lse)
        if name == "grad_queries_one":
            return lambda: launch((k, v, q, g, v, out, room), delta, lse, coeffs)
        parts = coeffs.new_empty(problem.heads, 2, problem.batch * launch.grid[0])
        return lambda: launch((q, g, lse, delta, k, v, g, room, more), parts, coeffs)

    def step(self, attend: Callable[..., Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        inputs = [x.clone().requires_grad_() for x in (self.q, self.k, self.v, self.coeffs)]

        def work() -> tuple[Tensor, ...]:
            y = attend(*inputs)
            # bound methods are equal, not identical
            used = inputs[:3] if attend == self.plain else inputs
            return torch.autograd.grad(y, used, self.g)

        return work

    def plain(self, q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
        scale, is_causal, _ = self.options
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    def around(self, q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
        return combine_degree_one(v, self.plain(q, k, v, coeffs), coeffs)

    def once(self, q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
        return filter_once(q, k, v, coeffs, None, self.options)


def use(choose: Callable[[str, int, bool], Tiles]) -> None:
    """Make the library take these tiles from now on."""
    one_pass.tiles = choose
    one_pass._launch.cache_clear()


def captured(work: Callable[[], object], repeats: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    return graph


def times(works: list[Callable[[], object]], repeats: int, rounds: int) -> list[float]:
    """Microseconds a call, the median over rounds in which all take turns."""
    graphs = [captured(work, repeats) for work in works]
    samples: list[list[float]] = [[] for _ in works]
    for _ in range(rounds + 1):
        for graph, taken in zip(graphs, samples, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) * 1000 / repeats)
    return [sorted(taken[1:])[rounds // 2] for taken in samples]


def compile_one(job: tuple[str, Tiles, bool]) -> str | None:
    """Compile one candidate into Triton's cache on disk; returns what failed."""
    name, cut, causal = job
    try:
        call = Call("1x1x256x64" + (":causal" if causal else ""))
        call.kernel(name, cut)()
        torch.cuda.synchronize()
    except Exception as failure:
        return f"{name} {tuple(cut)}: {failure!r}"[:300]
    return None


def measure(shape: str) -> None:
    call = Call(shape)
    if call.q.shape[3] <= eligibility.ONE_PASS_WIDEST:
        for name, cuts in CANDIDATES.items():
            taken = times([call.kernel(name, cut) for cut in cuts], 10, 5)
            ranked = sorted(zip(taken, cuts, strict=True))
            print(shape, name, *(f"{us:.1f}:{'.'.join(map(str, cut))}" for us, cut in ranked))
        use(CHOSEN)
        for name, eligibility.SWEEP_ONCE_FROM in FORWARDS.items():
            if call.options.is_causal:
                print(f"{shape} forward by {name} {times([call.forward], 10, 5)[0]:.1f} us")
        eligibility.SWEEP_ONCE_FROM = SWEEP_CHOSEN
    for name in hopper.KERNELS:
        print(f"{shape} {name} {times([call.hopper_kernel(name)], 10, 5)[0]:.1f} us")
    works = [call.step(attend) for attend in (call.plain, call.around, call.once)]
    plain, around, once = times(works, 5, 9)
    pairs = zip(works[2](), works[1](), strict=True)
    off = max(((x - y).float().norm() / y.float().norm()).item() for x, y in pairs)
    print(
        f"{shape} WHOLE plain {plain:.1f} us, around {around / plain:.3f}, "
        f"one pass {once / plain:.3f}; gradients differ by {off:.4f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--workers", type=int, default=12)
    arguments = parser.parse_args()
    start = time.perf_counter()
    jobs = [
        (name, cut, causal)
        for name, cuts in CANDIDATES.items()
        for cut in cuts
        for causal in (False, True)
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        for failure in pool.imap_unordered(compile_one, jobs):
            if failure:
                print("FAILED", failure)
    print(f"{time.perf_counter() - start:.0f} s of compiling", flush=True)
    for shape in arguments.shapes.split(","):
        measure(shape)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
