"""The short kernels' path: the filter and its gradient in one launch each, whole heads on chip.

In eager mode launches are prepared: beside kernels of some ten microseconds each Python call
counts. What the host does for calls of one signature is done once; a forward then looks its
signature up, allocates three tensors and launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gfsa.kernels.launching import (
    FULL_MASK,
    Forward,
    Gradients,
    Inputs,
    Launch,
    Options,
    Problem,
    Saved,
    copyable_by_tile,
    gluon_kernel,
    multiprocessors,
    on_device_of,
    padded,
    problem_of,
    result_strides,
    sum_groups,
)
from gfsa.kernels.routes import SHORT_HEAD_DIM
from gfsa.operators.call import DecisionCache


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
    q, k, v, coeffs, mask, seed, options, _ = given
    # tensors were copied where that was necessary
    prepared = prepared_for(q, k, v, mask, options)
    assert prepared is not None
    return prepared.forward(q, k, v, coeffs, mask, seed)


def backward(g: Tensor, saved: Saved, options: Options) -> Gradients:
    """As every route of ``op.py``."""
    prepared = prepared_for(saved.q, saved.k, saved.v, saved.mask, options)
    assert prepared is not None
    gradients = prepared.backward(g, saved)
    assert gradients is not None
    return gradients


@functools.lru_cache(maxsize=1024)
def forward_launch(problem: Problem) -> Launch:
    cut = chunks(problem.length, 64)
    # heads in flight on one multiprocessor, as registers and shared memory allow
    crowded = problem.options.dropout_p > 0.0 or problem.mask_kind == FULL_MASK
    at_once = {64: 3, 128: 1 if crowded else 2, 256: 1}[cut.rows]
    total = problem.batch * problem.heads
    programs = min(total, at_once * multiprocessors(problem.device))
    options = {"maxnreg": 128} if at_once == 2 else {}
    constants = (problem.length <= 208,)
    return _launch("filter_short", problem, cut, programs, 5, total, constants, options)


@functools.lru_cache(maxsize=1024)
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
    scale, is_causal, dropout_p, _ = problem.options
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


class Prepared:
    """The short kernels for tensors of one shape and layout."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options
    ) -> None:
        problem = problem_of(q, k, mask, options)
        self.launch = forward_launch(problem)
        self.shape, self.strides = q.shape, result_strides(q)
        self.dtype, self.device = q.dtype, q.device
        self.zero = zero(q.device)
        # the launch for these strides, which are fixed by the signature
        self.direct: Callable[..., None] | None = None
        self.backward_launch = backward_launch(problem)
        rows = self.backward_launch.blocks[0][2]
        self.parts = (problem.heads, 3, problem.batch * rows)
        self.mask_strides = None if mask is None else mask.stride()
        # a row of k and v for each query head; heads that share keys are added up afterwards
        self.key_strides, self.value_strides = (
            result_strides(x if problem.group == 1 else q) for x in (k, v)
        )
        # by the strides of the given tensors, which the copy engine takes as they are
        self.direct_backward: dict[tuple[Any, ...], Callable[..., None] | None] = {}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor, mask: Tensor | None, seed: Any = None
    ) -> Forward:
        """``(out, U, LSE)``, as every route's forward."""
        shape, strides, dtype, device = self.shape, self.strides, self.dtype, self.device
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        u = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        lse = torch.empty(shape[:3], dtype=torch.float32, device=device)
        tensors = (q, k, v, u, out)
        pointers = (
            lse,
            coeffs,
            q if mask is None else mask.view(torch.uint8),
            q if seed is None else seed,
            self.zero,
        )
        if self.direct is not None:
            on_device_of(q, self.direct, tensors, pointers)
            return out, u, lse
        on_device_of(q, self.launch, tensors, *pointers)
        self.direct = self.launch.direct.get(tuple([x.stride() for x in tensors]))
        return out, u, lse

    def backward(self, g: Tensor, saved: Saved) -> Gradients | None:
        """As every route's backward; None if that has to run."""
        q, k, v, u, out, lse, coeffs, mask, seed = saved
        given = (q, k, v, u, out, g)
        strides = tuple([x.stride() for x in given])
        if not self._takes(given, strides):
            return None
        if mask is not None and mask.stride() != self.mask_strides:
            return None
        shape, dtype, device = self.shape, self.dtype, self.device
        dq = torch.empty_strided(shape, self.strides, dtype=dtype, device=device)
        dk = torch.empty_strided(shape, self.key_strides, dtype=dtype, device=device)
        dv = torch.empty_strided(shape, self.value_strides, dtype=dtype, device=device)
        parts = torch.empty(self.parts, dtype=torch.float32, device=device)
        tensors = (*given, dq, dk, dv)
        pointers = (
            lse,
            parts,
            coeffs,
            q if mask is None else mask.view(torch.uint8),
            q if seed is None else seed,
        )
        direct = self.direct_backward[strides]
        if direct is not None:
            on_device_of(q, direct, tensors, pointers)
        else:
            on_device_of(q, self.backward_launch, tensors, *pointers)
            all_strides = tuple([x.stride() for x in tensors])
            self.direct_backward[strides] = self.backward_launch.direct.get(all_strides)
        return dq, sum_groups(dk, k), sum_groups(dv, v), parts

    def _takes(self, given: tuple[Tensor, ...], strides: tuple[Any, ...]) -> bool:
        """Whether the copy engine takes these; hooks may return saved tensors in other layouts."""
        if strides not in self.direct_backward:
            if any(copyable_by_tile(x) is not x for x in given):
                return False
            self.direct_backward[strides] = None
        addresses = 0
        for x in given:
            addresses |= x.data_ptr()
        return addresses % 16 == 0


# False where the short kernels cannot serve without copies
_PREPARED: DecisionCache[Prepared | bool] = DecisionCache()


def prepared_for(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options
) -> Prepared | None:
    """The prepared launches for a call that the short kernels take; None if it needs copies."""
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return None
    signature = (
        *(q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), v.stride()),
        None if mask is None else (mask.shape, mask.stride(), mask.dtype),
        options,
    )
    found = _PREPARED.get(signature)
    if found is None:
        found = all(copyable_by_tile(x) is x for x in (q, k, v))
        if found:
            found = Prepared(q, k, v, mask, options)
            if not is_kept(found.zero):
                # it is of the CUDA graph that is captured now, and is zero in its replays alone
                return found
        _PREPARED.remember(signature, found)
    return found if isinstance(found, Prepared) else None
