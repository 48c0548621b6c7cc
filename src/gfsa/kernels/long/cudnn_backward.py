r"""The gradient by two of cuDNN's attention gradients, for long sequences of wide heads.

The filter is two attentions, ``U = attend(q, k, V)`` and ``W = attend(q, k, c2·U)``, where W is
the output minus ``c0·V + c1·U``, so that nothing but U is saved for it:

.. math::
    W = out - c_0 V - c_1 U, \\
    (dq_2, dk_2, z) = \mathrm{attend}'(g;\, q, k, c_2 U, W), \qquad dU = c_1 g + c_2 z, \\
    (dq_1, dk_1, A^\top dU) = \mathrm{attend}'(dU;\, q, k, V, U), \\
    dc_0 = \sum \langle g, V\rangle, \quad dc_1 = \sum \langle g, U\rangle, \quad
    dc_2 = \sum \langle z, U\rangle .

That is ten matrix products instead of eight, but at head dim 128 cuDNN runs them faster than
Triton's code can run eight. An attention's gradient uses its output for ``rowsum(g∘W)`` alone, so
the error of W is that of plain attention: its output's rounding.

A few heads of all sequences are processed at a time, so that temporary tensors, cuDNN's workspace
included, are small beside the gradients.
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

from gfsa.kernels import elementwise
from gfsa.kernels.launcher import Kernel, Launch, multiprocessors
from gfsa.kernels.layout import empty_like, result_strides
from gfsa.kernels.long import launch as long
from gfsa.kernels.problem import Options, Problem, Saved, padded, problem_of
from gfsa.kernels.tile_access import describe

SHORTEST = 2048
ROWS = 64
# rows that cuDNN's kernels take at a time, and how many such tiles of a piece keep a multiprocessor
# busy together with those of the next piece, which runs at the same time
TILE = 128
BUSY = 1.75

forward = long.forward


def serves(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options) -> bool:
    """Whether this is the fastest gradient for a call, as measured on an H200."""
    if q.shape[3] <= 64 or q.shape[2] < SHORTEST:
        return False
    return long.cudnn_would_run(q, k, v, mask, options)


def backward(g: Tensor, saved: Saved, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :meth:`gfsa.kernels.dispatch.Path.backward`; without mask and dropout."""
    q, k, v, u, out, lse, coeffs, *_ = saved
    problem = problem_of(q, k, None, options)
    blocks = -(-problem.length // ROWS)
    dc = lse.new_empty(problem.heads, 3, problem.batch * blocks)
    cuts = pieces(problem.batch, problem.heads, problem.length, problem.device)
    if len(cuts) == 1:
        return *_piece([g, q, k, v, u, out], lse, coeffs, dc, None, problem), dc
    gradients = [empty_like(x) for x in (q, k, v)]
    with _two_streams(q) as streams:
        for stream, (sequences, heads) in zip(streams, cuts, strict=False):
            tensors = [x[sequences, heads] for x in (g, q, k, v, u, out)]
            into = [x[sequences, heads] for x in gradients]
            batch, number = tensors[0].shape[:2]
            part = problem._replace(batch=batch, heads=number, key_heads=number)
            dc_part = dc[heads, :, sequences.start * blocks :]
            with stream:
                _piece(tensors, lse[sequences, heads], coeffs[heads], dc_part, into, part)
    dq, dk, dv = gradients
    return dq, dk, dv, dc


@functools.lru_cache(maxsize=1024)
def pieces(
    batch: int, heads: int, length: int, device: int | None
) -> tuple[tuple[slice, slice], ...]:
    """Slices of sequences and heads to process one by one, as small as still fill the GPU.

    Either whole sequences or neighbouring heads of one, so that logsumexps are contiguous.
    """
    tiles = -(-length // TILE)
    least = math.ceil(BUSY * multiprocessors(device) / tiles)
    if least > heads:
        whole = slice(0, heads)
        return tuple((cut, whole) for cut in _cuts(batch, -(-least // heads)))
    return tuple((sequence, cut) for sequence in _cuts(batch, 1) for cut in _cuts(heads, least))


@contextmanager
def _two_streams(q: Tensor) -> Iterator[Iterator[AbstractContextManager[Any]]]:
    """The current stream and a second one by turns: the tiles of one piece fill gaps of the other.

    Memory freed in a stream is reused in it, so each stream holds the temporaries of one piece.
    """
    if not q.is_cuda:
        yield itertools.repeat(nullcontext())
        return
    current = torch.cuda.current_stream(q.device)
    second = _second_stream(current)
    second.wait_stream(current)
    try:
        yield itertools.cycle((nullcontext(), torch.cuda.stream(second)))
    finally:
        # after a failure too: code that catches it may write where the second stream still reads
        current.wait_stream(second)


@functools.lru_cache(maxsize=64)
def _second_stream(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """A stream for each stream: a capture must not contain the work of other threads."""
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for some of the heads, written to ``into`` if that is given."""
    g, q, k, v, u, out = tensors
    options = problem.options
    launches = _launches(problem, dc.stride(1))
    # in the layout that attention's output has for such queries
    w, x = torch.empty_like(q), torch.empty_like(q)
    strides = w.stride()
    launches["second_pass"]((out, v, u, w, x), coeffs)
    dq2, dk2, du = attention_gradient(laid_out(g, strides), q, k, x, w, lse, options)
    # freed before more is allocated
    del w, x
    launches["grad_first"]((g, v, u, du), coeffs, dc)
    first = attention_gradient(du, q, k, v, laid_out(u, strides), lse, options)
    if into is None:
        pairs = zip(first, (q, k, v), strict=True)
        into = [x if x.stride() == result_strides(like) else empty_like(like) for x, like in pairs]
    dq, dk, dv = into
    launches["add_up"]((g, *first, dq2, dk2, dq, dk, dv), coeffs)
    return dq, dk, dv


def laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``x``, or a copy with these strides.

    Torch looks cuDNN's plan for a gradient up by the layouts of q, k and v. The layouts of the
    output and its gradient have to follow from those, or torch silently runs the plan of another
    layout.
    """
    dims = zip(x.shape, x.stride(), strides, strict=True)
    if all(size == 1 or stride == wanted for size, stride, wanted in dims):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def attention_gradient(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """cuDNN's; ``g`` and ``out`` as :func:`laid_out` lays them out for q, k and v."""
    length = q.shape[2]
    # the random state, of which dropout alone has need
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    # contiguous strides, also if it is a slice of a larger tensor
    lse = lse.reshape(-1).view(*q.shape[:3], 1)
    gradients: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, out, lse, unused, unused, None, None, None, length, length, 0.0,
        options.is_causal, scale=options.scale,
    )  # fmt: skip
    return gradients


# kernels, and how many tensors each of them takes
_KERNELS = {
    "second_pass": (Kernel(elementwise.second_pass, describe), 5),
    "grad_first": (Kernel(elementwise.grad_first, describe), 4),
    "add_up": (Kernel(elementwise.add_up, describe), 9),
}


@functools.lru_cache(maxsize=1024)
def _launches(problem: Problem, parts: int) -> dict[str, Launch]:
    """Each kernel over the rows of one piece, whose dc is a slice of ``(H, 3, parts)``."""
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
