"""A kernel that holds multiprocessors while others run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _hold(released, held, PATIENCE: tl.constexpr):
    """Stay until ``released`` is not zero, or PATIENCE nanoseconds are over."""
    tl.atomic_add(held, 1)
    start = _now()
    while (tl.atomic_add(released, 0) == 0) & (_now() - start < PATIENCE):
        pass
    tl.atomic_add(held, -1)


@triton.jit
def _now():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


class Held:
    """What :func:`hold_multiprocessors` holds."""

    def __init__(self, count: int, programs: Tensor) -> None:
        self.count, self.programs = count, programs

    def still_runs(self) -> bool:
        """Whether all the programs are there, and have not lost their patience."""
        return int(self.programs) == self.count


@contextmanager
def hold_multiprocessors(count: int, patience: float = 5.0) -> Iterator[Held]:
    """Hold so many multiprocessors of the GPU, each by one program of 1,024 threads."""
    released, programs = torch.zeros(2, dtype=torch.int32, device="cuda").unbind()
    # what is run while the kernel holds on must be loaded by then: loading waits for all kernels
    released.fill_(0)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        _hold[(count,)](released, programs, int(patience * 1e9), num_warps=32)
    try:
        while int(programs) < count:
            pass
        yield Held(count, programs)
    finally:
        released.fill_(1)
        torch.cuda.synchronize()
