"""Runs every kind of fused kernel once, forward and backward, on small tensors.

    compute-sanitizer --tool memcheck python benchmarks/sanitize.py [PART …]

Parts are ``control``, ``sweep``, ``packed``, ``wide``, ``hopper``, ``decode``, ``one-sweep``,
``one-pass``, ``short``, ``long`` and ``around``; all of them unless some are named, which run in
their order. A line says which kernels ran. ``--tool racecheck`` checks shared memory in the same
way; it reports races in the sweeps, and ``control`` shows whether it does so for any kernel whose
warps hand numbers over by barriers in memory.
The tool comes with CUDA and in the package nvidia-cuda-sanitizer-api. It takes minutes to check
kernels that are compiled in the same run: run the script without it first, which fills Triton's
cache on disk.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from handover import NUMBERS, handed_over
from torch import Tensor

from gfsa.functional import graph_filter_attention
from gfsa.kernels.autograd import kernels_for
from gfsa.kernels.decode import decode, new_counters
from gfsa.kernels.hopper import backward_path as hopper
from gfsa.kernels.problem import Options, problem_of
from gfsa.kernels.sweep import launch as sweep
from gfsa.operators import AttentionOperator, Coefficients, Visibility


class Call(NamedTuple):
    """A call on two sequences of two heads."""

    tokens: int
    dim: int
    degree: int = 2
    causal: bool = False
    padded: bool = False
    dropout_p: float = 0.0


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def called(call: Call) -> None:
    """Forward and backward of one call by the fused kernels."""
    tokens, dim, degree, causal, padded, dropout_p = call
    q, k, v = (randn(2, 2, tokens, dim).requires_grad_() for _ in range(3))
    coeffs = torch.randn(2, degree + 1, device="cuda", requires_grad=True)
    mask = None
    if padded:
        mask = torch.ones(2, 1, 1, tokens, dtype=torch.bool, device="cuda")
        mask[1, ..., tokens // 2 :] = False
    y = graph_filter_attention(q, k, v, coeffs, mask, dropout_p, causal, backend="fused")
    y.backward(torch.randn_like(y))
    ran = "degree 1"
    if degree == 2:
        options = Options(dim**-0.5, causal, dropout_p)
        forward, gradient, _ = kernels_for(q, mask, options)
        ran = f"{forward} and {gradient}"
        if gradient == "hopper" and hopper.adds_up_queries(problem_of(q, k, mask, options)):
            ran += ", dQ added up"
    finish(f"{call}: {ran}")


def packed(dim: int) -> None:
    """Documents forward and backward, of degrees 1 and 2, in a window and without one.

    They begin beside multiples of 16 bytes of float32; some are as long as a block of 64 or 128.
    """
    cases = (([0, 100, 101], 90), ([0, 67, 201], None))
    for (starts, window), degree in itertools.product(cases, (1, 2)):
        q = randn(1, 4, 332, dim).requires_grad_()
        k, v = (randn(1, 2, 332, dim).requires_grad_() for _ in range(2))
        visible = Visibility.packed(torch.tensor(starts, device="cuda"), 332, window=window)
        coeffs = torch.randn(4, degree + 1, device="cuda", requires_grad=True)
        y = AttentionOperator(q, k, visible=visible, enable_gqa=True, backend="fused").polynomial(
            coeffs, v
        )
        y.backward(torch.randn_like(y))
        of = f"332 tokens of {dim}, packed from {starts} in a window of {window}"
        finish(f"{of}: degree {degree}")


def decoded(dim: int) -> None:
    """One token after 298, whose keys several programs share; growing, then by a static cache."""
    k, v, u = (randn(2, 2, 300, dim) for _ in range(3))
    q = randn(2, 4, 1, dim)
    u = u.repeat_interleave(2, 1)
    filters = {
        powers: Coefficients(
            *(torch.randn(4, powers, device="cuda") for _ in range(2)),
            torch.randn(powers, powers, device="cuda"),
        )
        for powers in (2, 3)
    }
    mask = torch.ones(2, 1, 1, 300, dtype=torch.bool, device="cuda")
    mask[0, ..., :70] = False
    length = torch.tensor(299, device="cuda")
    counters = new_counters(8, q.device)
    for powers, coeffs in filters.items():
        rows = u if powers == 3 else None
        for _ in range(2):
            decode(q, k, v, rows, coeffs, None, None, dim**-0.5)
            decode(q, k, v, rows, coeffs, mask, length, dim**-0.5, counters)
        finish(f"one token of {dim} after 299 and 298: degree {powers - 1}")


def swept(dim: int) -> None:
    """The causal forward in one sweep, where it was not timed as well; and with documents.

    Two of them begin with a block, of which one is cut short; then in a window.
    """
    length, starts = 435, torch.tensor([0, 61, 199, 240], device="cuda")
    q, k, v = randn(2, 4, length, dim), randn(2, 2, length, dim), randn(2, 2, length, dim)
    coeffs = torch.randn(4, 3, device="cuda")
    for window in (None, 150):
        visible = Visibility.packed(starts, length, window=window)
        spans = visible.spans(length, q.device)
        sweep.forward(q, k, v, coeffs, spans, None, Options(dim**-0.5, True))
    sweep.forward(q, k, v, coeffs, None, None, Options(dim**-0.5, True))
    finish(f"{length} tokens of {dim} in one causal sweep")


def control() -> None:
    """No kernel of gfsa's: see ``handover.py``."""
    found, expected = handed_over(), sum(range(NUMBERS))
    if found != expected:
        raise RuntimeError(f"expected the sum {expected} of what was handed over, got {found}")
    finish(f"{NUMBERS} numbers handed from one warp to four")


def finish(ran: str) -> None:
    """Wait for the kernels, so that an error is theirs."""
    torch.cuda.synchronize()
    print(ran, flush=True)


def of_calls(*calls: Call) -> list[Callable[[], None]]:
    return [functools.partial(called, call) for call in calls]


def by_dim(run: Callable[[int], None]) -> list[Callable[[], None]]:
    return [functools.partial(run, dim) for dim in (64, 128)]


# most that is on the chip at a time, and what waits for other programs, first
PARTS = {
    "control": [control],
    "sweep": by_dim(swept),
    "packed": by_dim(packed),
    # dQ added up with dK and dV: a last block that is not full, and whole ones
    "wide": of_calls(Call(132, 128, causal=True), Call(256, 128, causal=True)),
    # lengths that are multiples of 4, beyond the short kernels' or with wider heads
    "hopper": of_calls(
        Call(260, 64, causal=True),
        Call(260, 64, causal=True, padded=True),
        Call(100, 128, causal=True),
        Call(100, 80, padded=True),
    ),
    "decode": by_dim(decoded),
    "short": of_calls(
        Call(100, 64, padded=True), Call(128, 64, causal=True, dropout_p=0.1), Call(197, 40)
    ),
    # what the Hopper kernels do not take: dropout, other lengths
    "long": of_calls(
        Call(290, 32, padded=True, dropout_p=0.1),
        Call(301, 64, causal=True),
        Call(2049, 128, causal=True),
    ),
    "one-pass": of_calls(Call(300, 64, degree=1, causal=True), Call(300, 64, degree=1)),
    # degree 1 in one causal sweep, and its gradient in Gluon
    "one-sweep": of_calls(
        Call(1100, 64, degree=1, causal=True),
        Call(1100, 64, degree=1),
        Call(1100, 128, degree=1, causal=True),
        # keeps A·V for cuDNN's gradient
        Call(4100, 128, degree=1, causal=True),
    ),
    "around": of_calls(Call(64, 64, degree=1, padded=True)),
}


def main(parts: list[str]) -> None:
    # dQ added up with dK and dV for few tokens, too
    hopper.LEAST_WITH_QUERIES = 132
    for part in parts or PARTS:
        for run in PARTS[part]:
            run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    chosen = parser.parse_args().parts
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        parser.error(f"expected parts of {', '.join(PARTS)}, got {', '.join(unknown)}")
    main(chosen)
