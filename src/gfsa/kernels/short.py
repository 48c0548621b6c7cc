"""The short kernels' path: the filter and its gradient in one launch each, whole heads on chip."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from gfsa.kernels.launching import (
    FULL_MASK,
    Forward,
    Given,
    Gradients,
    Inputs,
    Launch,
    Launches,
    Options,
    Prepared,
    Problem,
    Saved,
    gluon_kernel,
    multiprocessors,
    padded,
    problem_of,
    room,
    room_like,
    rooms_by_query_head,
    sum_groups,
)
from gfsa.kernels.routes import SHORT_HEAD_DIM


class Chunks(NamedTuple):
    """How the kernels cut one length.

    Args:
        rows: tokens, padded to what the warps hold: 16 a warp.
        width: keys a chunk.
        full: chunks of full width.
        tail: keys of the last, narrower chunk; 0 if there is none.
    """

    rows: int
    width: int
    full: int
    tail: int


@functools.cache
def chunks(length: int, width: int) -> Chunks:
    rows = max(64, padded(length))
    full, rest = divmod(length, width)
    tail = padded(rest) if rest else 0
    if tail == width:
        full, tail = full + 1, 0
    return Chunks(rows, width, full, tail)


def forward(given: Inputs) -> Forward:
    """As every route of ``op.py``."""
    q, k, v, coeffs, mask, seed, options, keeps, _ = given
    return _FORWARD((q, k, v), (coeffs, seed), mask, options, keeps)


def backward(g: Tensor, saved: Saved, options: Options) -> Gradients:
    """As every gradient of ``op.py``."""
    q, k, v, u, out, lse, coeffs, mask, seed, _ = saved
    dq, dk, dv, dc = _BACKWARD((q, k, v, u, out, g), (coeffs, lse, seed), mask, options)
    return dq, sum_groups(dk, k), sum_groups(dv, v), dc


def _prepare_forward(given: Given, options: Options, keeps: bool) -> Prepared:
    q, unset = given["q"], zero(given["q"].device)
    launch = forward_launch(problem_of(q, given["k"], given["mask"], options), keeps)
    rooms = {
        "out": room_like(q),
        "u": room_like(q),
        "lse": room(q.shape[:3], q, dtype=torch.float32),
        "zero": lambda: unset,
    }
    steps = [(launch, "q k v u out", "lse coeffs mask seed zero")]
    # a zero of a CUDA graph that is captured now is zero in its replays alone
    return Prepared(given, rooms, steps, "out u lse", is_kept(unset))


def _prepare_backward(given: Given, options: Options) -> Prepared:
    q = given["q"]
    problem = problem_of(q, given["k"], given["mask"], options)
    launch = backward_launch(problem)
    parts = problem.heads, 3, problem.batch * launch.blocks[0][2]
    rooms = {"dq": room_like(q), **rooms_by_query_head(given)}
    rooms["parts"] = room(parts, q, dtype=torch.float32)
    steps = [(launch, "q k v u out g dq dk dv", "lse parts coeffs mask seed")]
    return Prepared(given, rooms, steps, "dq dk dv parts")


_FORWARD = Launches[Forward](_prepare_forward, "q k v", "coeffs seed")
_BACKWARD = Launches[Gradients](_prepare_backward, "q k v u out g", "coeffs lse seed")


def forward_launch(problem: Problem, keeps: bool) -> Launch:
    cut = chunks(problem.length, 64)
    # heads in flight on one multiprocessor, as registers and shared memory allow
    crowded = problem.options.dropout_p > 0.0 or problem.mask_kind == FULL_MASK
    at_once = {64: 3, 128: 1 if crowded else 2, 256: 1}[cut.rows]
    total = problem.batch * problem.heads
    programs = min(total, at_once * multiprocessors(problem.device))
    options = {"maxnreg": 128} if at_once == 2 else {}
    constants = problem.length <= 208, keeps
    return _launch("filter_short", problem, cut, programs, 5, total, constants, options)


def backward_launch(problem: Problem) -> Launch:
    length = problem.length
    cut = chunks(length, 128 if 64 < length <= 128 else 64)
    programs, constants = problem.batch * problem.heads, (cut.rows > 128, length == cut.rows)
    return _launch("grad_short", problem, cut, programs, 9, problem.batch, constants, {})


def _launch(
    name: str,
    problem: Problem,
    cut: Chunks,
    programs: int,
    tensors: int,
    first: int,
    own: tuple[bool, ...],
    options: dict[str, int],
) -> Launch:
    """A kernel over ``programs``, with its ``first`` number and ``own`` constants."""
    rows, width, full, tail = cut
    scale, is_causal, dropout_p, *_ = problem.options
    mask_b, _, mask_i, mask_j = problem.mask_strides
    return Launch(
        gluon_kernel("gluon_short", name),
        (programs, 1, 1),
        problem.variant,
        [(1, 1, rows, SHORT_HEAD_DIM)] * tensors,
        (first, *problem.sizes, scale, mask_b, mask_i, mask_j, dropout_p),
        (
            *(rows, SHORT_HEAD_DIM, width, full, tail, *own),
            *(is_causal, problem.mask_kind, dropout_p > 0.0),
        ),
        num_warps=rows // 16,
        **options,
    )


def zero(device: torch.device) -> Tensor:
    """A zero that every launch on the device reads.

    Another thread allocates it: where the compiler prepares CUDA graphs
    (``mode="reduce-overhead"``), all that the calling thread allocates belongs to these graphs, and
    torch raises an error if any of it is kept.
    """
    known = _ZEROS.get(device)
    if known is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # it belongs to the graph, and each replay sets it to zero
            return torch.zeros(1, dtype=torch.int32, device=device)
        with ThreadPoolExecutor(1) as pool:
            # a copy from the host: it is there when the other thread returns
            work = pool.submit(lambda: torch.zeros(1, dtype=torch.int32, device="cpu").to(device))
            known = _ZEROS[device] = work.result()
    return known


def is_kept(zero: Tensor) -> bool:
    """Whether later launches find the same zero, which then is one outside of CUDA graphs, too."""
    return _ZEROS.get(zero.device) is zero


_ZEROS: dict[torch.device, Tensor] = {}
