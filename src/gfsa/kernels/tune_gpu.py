"""A GPU as ``gfsa tune`` measures it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from torch import Tensor

from gfsa.kernels.routes import Backend, refusal_by_fused, situation_of
from gfsa.kernels.tuned import Row, Shape
from gfsa.operators.attention import AttentionOperator
from gfsa.operators.call import AttentionCall
from gfsa.operators.dense import DenseOperator

HEADS = 16
# as many tokens in a batch whatever their length
TOKENS = 16384
# entries of the maps that the dense operator writes in float64 where it checks: 256 MiB each
CHECKED_ENTRIES = 2**25
# calls are timed a few at a time, fewer where one of them takes longer than SAMPLE_MS
ROUNDS, CALLS, SAMPLE_MS = 5, 5, 10.0
THREADS = 16
_BACKENDS: tuple[Backend, Backend] = ("fused", "sdpa")


class GPU:
    """Measures calls in bfloat16 on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def refusal(self, shape: Shape) -> str | None:
        """Why the fused kernels cannot serve such a call here, or None."""
        q, _, v, _, mask, _ = self._tensors(shape, 1, 2, 16)
        call = AttentionCall(q, q, mask, is_causal=shape.causal)
        return refusal_by_fused(situation_of(call, v, shape.degree))

    def prepare(self, shapes: Sequence[Shape]) -> Iterator[Shape]:
        """Compile what the shapes need, several kernels at a time; yields each when it is done.

        What cannot be compiled is reported when it is measured.
        """
        pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
        try:
            work = {pool.submit(self._compile, shape): shape for shape in shapes}
            for done in as_completed(work):
                yield work[done]
        finally:
            # after an interruption too: what has not begun is left out
            pool.shutdown(cancel_futures=True)

    def _compile(self, shape: Shape) -> None:
        """Run the kernels of a shape once, for one head."""
        # otherwise autograd runs, and so compiles, the backward passes of all threads in one
        with torch.cuda.device(self.device), torch.autograd.set_multithreading_enabled(False):
            self._call(shape, self._tensors(shape, 1, 1, shape.tokens), _BACKENDS[0])

    def measure(self, shape: Shape) -> Row | str:
        """The row of a shape, exactness first, then times; or why there is none."""
        refusal = self.refusal(shape)
        if refusal is not None:
            return refusal
        try:
            errors = self.errors(shape)
            return Row(shape, *self.times(shape), *errors)
        except Exception as error:
            # a compiler or a driver may raise anything on a GPU that was never measured; the other
            # shapes may still run
            return f"failed: {type(error).__name__}: {error}"

    def errors(self, shape: Shape) -> tuple[float, float]:
        """Errors of the fused kernels and of torch's against the dense operator in float64."""
        # of the tokens that are timed: other lengths have other tiles and other kernels
        fit = CHECKED_ENTRIES // shape.tokens**2
        batch, heads = (2, 3) if fit >= 6 else (1, max(1, fit))
        given = self._tensors(shape, batch, heads, shape.tokens)
        *inputs, mask, g = given
        q, k, v, coeffs = (x.detach().double().requires_grad_() for x in inputs)
        y = DenseOperator.from_qk(q, k, mask, shape.causal).polynomial(coeffs, v)
        wanted = [y, *torch.autograd.grad(y, (q, k, v, coeffs), g.double())]
        found = []
        for backend in _BACKENDS:
            parts = zip(self._call(shape, given, backend), wanted, strict=True)
            found.append(max(_error(x, exact) for x, exact in parts))
        return found[0], found[1]

    def times(self, shape: Shape) -> tuple[float, float]:
        """Milliseconds, forward and backward, by the fused kernels and by torch's."""
        given = self._tensors(shape, max(1, TOKENS // shape.tokens), HEADS, shape.tokens)

        def sample(backend: Backend, calls: int) -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._call(shape, given, backend)
            start.record()
            for _ in range(calls):
                self._call(shape, given, backend)
            end.record()
            torch.cuda.synchronize(self.device)
            return start.elapsed_time(end) / calls

        # events are those of the current device
        with torch.cuda.device(self.device):
            calls = {x: max(1, min(CALLS, int(SAMPLE_MS / sample(x, 1)))) for x in _BACKENDS}
            best = dict.fromkeys(_BACKENDS, float("inf"))
            # in turns, since a GPU becomes slower as it becomes warm
            for _ in range(ROUNDS):
                for backend in best:
                    best[backend] = min(best[backend], sample(backend, calls[backend]))
        return best["fused"], best["sdpa"]

    def _tensors(self, shape: Shape, batch: int, heads: int, length: int) -> tuple[Any, ...]:
        """``q, k, v``, the coefficients, the mask and the output's gradient."""
        torch.manual_seed(0)
        size = (batch, heads, length, shape.head_dim)
        make: dict[str, Any] = {"device": self.device, "dtype": torch.bfloat16}
        q, k, v = (torch.randn(size, **make).requires_grad_() for _ in range(3))
        coeffs = torch.full((heads, shape.degree + 1), 0.3, device=self.device).requires_grad_()
        mask = None
        if shape.masked:
            mask = torch.ones(batch, 1, 1, length, dtype=torch.bool, device=self.device)
            mask[..., length - length // 8 :] = False
        return q, k, v, coeffs, mask, torch.randn(size, **make)

    def _call(self, shape: Shape, given: tuple[Any, ...], backend: Backend) -> list[Tensor]:
        """The output and the gradients of q, k, v and the coefficients."""
        q, k, v, coeffs, mask, g = given
        operator = AttentionOperator(q, k, mask, is_causal=shape.causal, backend=backend)
        y = operator.polynomial(coeffs, v)
        return [y, *torch.autograd.grad(y, (q, k, v, coeffs), g)]


def _error(x: Tensor, y: Tensor) -> float:
    return float((x.detach().double() - y.detach()).norm() / y.detach().norm())
