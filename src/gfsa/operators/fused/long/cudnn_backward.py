r"""The gradient by two of cuDNN's attention gradients, for long sequences of wide heads.

The filter is two attentions, ``U = attend(q, k, V)`` and ``W = attend(q, k, c2·U)``, where W is
what the output has beside ``c0·V + c1·U``, so that nothing but U is kept for it:

.. math::
    W = out - c_0 V - c_1 U, \\
    (dq_2, dk_2, z) = \mathrm{attend}'(g;\, q, k, c_2 U, W), \qquad dU = c_1 g + c_2 z, \\
    (dq_1, dk_1, A^\top dU) = \mathrm{attend}'(dU;\, q, k, V, U), \\
    dc_0 = \sum \langle g, V\rangle, \quad dc_1 = \sum \langle g, U\rangle, \quad
    dc_2 = \sum \langle z, U\rangle .

That is ten matrix products instead of eight, but at head dim 128 cuDNN runs them faster than
Triton's code can run eight. An attention's gradient takes its output for ``rowsum(g∘W)`` alone, so
the error of W is that of plain attention: its output's rounding.

The heads of all sequences go through this a few at a time: what is made on the way is then small
beside the gradients, cuDNN's workspace included.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gfsa.operators.fused import elementwise
from gfsa.operators.fused.launcher import Kernel, Launch, empty_like, multiprocessors, room_strides
from gfsa.operators.fused.long import launch as passes
from gfsa.operators.fused.long.launch import Options, Problem, padded, problem_of

SHORTEST = 2048
ROWS = 64
# rows that cuDNN's kernels take at a time, and how many such tiles of a piece keep a multiprocessor
# busy beside those of the next piece, which runs at the same time
TILE = 128
BUSY = 1.75

forward = passes.forward


def serves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> bool:
    """Whether this way is the faster one, measured on an H200."""
    if q.shape[3] <= 64 or q.shape[2] < SHORTEST:
        return False
    return passes.cudnn_would_run(q, k, v, Options(scale, is_causal, mask, dropout_p))


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    out: Tensor,
    lse: Tensor,
    coeffs: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`gfsa.operators.fused.long.launch.backward`."""
    problem = problem_of(q, k, options)
    blocks = -(-problem.length // ROWS)
    dc = lse.new_empty(problem.heads, 3, problem.batch * blocks)
    cuts = pieces(problem.batch, problem.heads, problem.length, problem.device)
    if len(cuts) == 1:
        return *_piece([g, q, k, v, u, out], lse, coeffs, dc, None, problem, options), dc
    gradients = [empty_like(x) for x in (q, k, v)]
    with _two_streams(q) as streams:
        for stream, (sequences, heads) in zip(streams, cuts, strict=False):
            tensors = [x[sequences, heads] for x in (g, q, k, v, u, out)]
            into = [x[sequences, heads] for x in gradients]
            batch, number = tensors[0].shape[:2]
            part = problem._replace(batch=batch, heads=number, key_heads=number)
            dc_part = dc[heads, :, sequences.start * blocks :]
            with stream:
                _piece(tensors, lse[sequences, heads], coeffs[heads], dc_part, into, part, options)
    dq, dk, dv = gradients
    return dq, dk, dv, dc


@functools.lru_cache(maxsize=1024)
def pieces(
    batch: int, heads: int, length: int, device: int | None
) -> tuple[tuple[slice, slice], ...]:
    """Sequences and heads to work through, as few at a time as still fill the GPU.

    Either whole sequences or neighbouring heads of one, so that logsumexps lie in one piece.
    """
    tiles = -(-length // TILE)
    least = math.ceil(BUSY * multiprocessors(device) / tiles)
    if least > heads:
        whole = slice(0, heads)
        return tuple((cut, whole) for cut in _cuts(batch, -(-least // heads)))
    return tuple((one, cut) for one in _cuts(batch, 1) for cut in _cuts(heads, least))


@contextmanager
def _two_streams(q: Tensor) -> Iterator[Iterator[AbstractContextManager[Any]]]:
    """This stream and one beside it by turns: where a piece runs out of tiles, the next has some.

    What is made in a stream is given back to it, so each has its room for one piece.
    """
    if not q.is_cuda:
        yield itertools.repeat(nullcontext())
        return
    here = torch.cuda.current_stream(q.device)
    beside = _beside(here)
    beside.wait_stream(here)
    try:
        yield itertools.cycle((nullcontext(), torch.cuda.stream(beside)))
    finally:
        # after a failure too: whoever catches it may write where that stream still reads
        here.wait_stream(beside)


@functools.lru_cache(maxsize=64)
def _beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """One for each: a stream that is captured has none of another thread's work beside it."""
    return torch.cuda.Stream(stream.device)


def _cuts(total: int, least: int) -> list[slice]:
    """``total`` in equal parts of ``least`` or a little more."""
    parts = max(1, total // least)
    ends = [total * part // parts for part in range(parts + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


def _piece(
    tensors: Sequence[Tensor],
    lse: Tensor,
    coeffs: Tensor,
    dc: Tensor,
    into: Sequence[Tensor] | None,
    problem: Problem,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for some of the heads, ``into`` what is given, else in place."""
    g, q, k, v, u, out = tensors
    launches = _launches(problem, dc.stride(1))
    # as attention lays its output out for such queries
    w, x = torch.empty_like(q), torch.empty_like(q)
    strides = w.stride()
    launches["second_pass"]((out, v, u, w, x), coeffs)
    dq2, dk2, du = _attention_gradient(_laid_out(g, strides), q, k, x, w, lse, options)
    # before more is made
    del w, x
    launches["grad_first"]((g, v, u, du), coeffs, dc)
    first = _attention_gradient(du, q, k, v, _laid_out(u, strides), lse, options)
    if into is None:
        pairs = zip(first, (q, k, v), strict=True)
        into = [x if x.stride() == room_strides(like) else empty_like(like) for x, like in pairs]
    dq, dk, dv = into
    launches["add_up"]((g, *first, dq2, dk2, dq, dk, dv), coeffs)
    return dq, dk, dv


def _laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``x``, or a copy with these strides.

    Torch finds cuDNN's plan for a gradient by the layouts of q, k and v; those of the output and
    its gradient have to follow from them, or another layout's plan runs, in silence.
    """
    dims = zip(x.shape, x.stride(), strides, strict=True)
    if all(size == 1 or mine == wanted for size, mine, wanted in dims):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _attention_gradient(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    length = q.shape[2]
    # without dropout nothing is random
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    # with the strides of a tensor of this shape, whatever it is a part of
    lse = lse.reshape(-1).view(*q.shape[:3], 1)
    gradients: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, out, lse, unused, unused, None, None, None, length, length, 0.0,
        options.is_causal, scale=options.scale,
    )  # fmt: skip
    return gradients


# kernels, and how many tensors each one takes
_KERNELS = {
    "second_pass": (Kernel(elementwise.second_pass), 5),
    "grad_first": (Kernel(elementwise.grad_first), 4),
    "add_up": (Kernel(elementwise.add_up), 9),
}


@functools.lru_cache(maxsize=1024)
def _launches(problem: Problem, parts: int) -> dict[str, Launch]:
    """Each kernel over the rows of one piece, whose dc is a part of ``(H, 3, parts)``."""
    width = padded(problem.head_dim)
    return {
        name: Launch(
            kernel,
            (-(-problem.length // ROWS), problem.batch * problem.heads, 1),
            problem.variant,
            [(1, 1, ROWS, width)] * tensors,
            (problem.heads, parts) if name == "grad_first" else (problem.heads,),
            (ROWS, width),
            num_warps=4,
        )
        for name, (kernel, tensors) in _KERNELS.items()
    }
