"""Times of the causal kernels by how many heads are worked on at a time, on a GPU.

    python benchmarks/heads_at_a_time.py 1x16x32768x128@2,4,8,16 4x16x4096x128@16,32,64
    python benchmarks/heads_at_a_time.py --packed 4x16x8192x64@2,8,32,64 --pause PID

For each number of heads: the forward with so many in its sweep, then forward and backward with so
many in the gradient, as CUDA graphs. Ratios are to plain causal attention or, of packed rows, to
the filter on causal rows of equal work. The order of the work changes no bit of the output, which
is checked.
The fastest go into ``kernels/sweep/launch.py`` and ``hopper/backward_path.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.functional import graph_filter_attention
from gfsa.kernels.hopper import backward_path as gradient
from gfsa.kernels.sweep import launch as sweep
from gfsa.operators import AttentionOperator, Visibility
from gfsa.operators.choice import Backend
from gfsa_benchmarks.case import Shape
from gfsa_benchmarks.packed import document_lengths, equal_rows
from gfsa_benchmarks.timing import Work, captured, interleaved

ROUNDS = 5
DEVICE = "cuda"
BACKEND: Backend = "fused"
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@contextmanager
def working_on(heads: int, module: Any, launches: Any) -> Iterator[None]:
    """Launches of a module with so many heads at a time.

    Args:
        launches: the function of the module that keeps its launches.
    """
    launches.cache_clear()
    with mock.patch.object(module, "heads_at_a_time", return_value=heads):
        yield
    launches.cache_clear()


def plain(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


def causal(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return graph_filter_attention(
        q, k, v, coeffs, is_causal=True, enable_gqa=grouped, backend=BACKEND
    )


def packed(documents: Tensor) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
        visible = Visibility(causal=True, documents=documents, in_order=True)
        return AttentionOperator(q, k, visible=visible, backend=BACKEND).polynomial(coeffs, v)

    return attend


class Case:
    """An attention on tensors of one shape."""

    def __init__(self, attend: Attention, batch: int, tokens: int, shape: Shape) -> None:
        self.attend = attend
        of_keys = shape.key_heads or shape.heads
        self.tokens = [
            torch.randn(batch, heads, tokens, shape.dim, device=DEVICE, dtype=torch.bfloat16)
            for heads in (shape.heads, of_keys, of_keys)
        ]
        self.coeffs = torch.tensor([0.1, 0.8, 0.1], device=DEVICE).repeat(shape.heads, 1)
        self.g = torch.randn_like(self.tokens[0])

    @torch.no_grad()
    def forward(self) -> Tensor:
        q, k, v = self.tokens
        return self.attend(q, k, v, self.coeffs)

    def both(self) -> object:
        q, k, v, coeffs = (x.detach().requires_grad_() for x in (*self.tokens, self.coeffs))
        y = self.attend(q, k, v, coeffs)
        # plain attention has no coefficients
        return torch.autograd.grad(y, (q, k, v, coeffs), self.g, allow_unused=True)


def measured(text: str, is_packed: bool, pause: int | None) -> None:
    """Print two lines for one shape: the forward, then forward and backward."""
    described, _, numbers = text.partition("@")
    shape = Shape.parse(described)
    if is_packed:
        lengths = [document_lengths(shape.tokens, row) for row in range(shape.batch)]
        rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
        documents = torch.stack(rows)[:, None].to(DEVICE)
        own = Case(packed(documents), shape.batch, shape.tokens, shape)
        reference, name = Case(causal, *equal_rows(lengths), shape), "causal rows"
    else:
        own = Case(causal, shape.batch, shape.tokens, shape)
        reference, name = Case(plain, shape.batch, shape.tokens, shape), "plain"
    expected = own.forward()
    works: dict[str, list[Work]] = {"forward": [captured(reference.forward)]}
    works["both"] = [captured(reference.both)]
    heads = [int(number) for number in numbers.split(",")]
    for number in heads:
        with working_on(number, sweep, sweep._launch):
            assert torch.equal(own.forward(), expected), f"another result with {number} heads"
            works["forward"].append(captured(own.forward))
        with working_on(number, gradient, gradient._launches):
            works["both"].append(captured(own.both))
    for what, timed in works.items():
        times = [t.median for t in interleaved(timed, ROUNDS, torch.device(DEVICE), pause=pause)]
        cells = [
            f"{n}: {t:.3f} ({t / times[0]:.3f})" for n, t in zip(heads, times[1:], strict=True)
        ]
        print(f"{described} {what}, ms: {name} {times[0]:.3f}; {', '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="+", metavar="SHAPE@HEADS,…")
    parser.add_argument("--packed", action="store_true", help="rows of documents")
    parser.add_argument("--pause", type=int, metavar="PID", help="as in gfsa bench")
    given = parser.parse_args()
    for text in given.shapes:
        measured(text, given.packed, given.pause)


if __name__ == "__main__":
    main()
