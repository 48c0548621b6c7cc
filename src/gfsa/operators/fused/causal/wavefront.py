"""Programs that depend on each other: tickets give the order, flags say how far a program is.

A program takes its ticket when it runs, so all lower tickets belong to programs that run or have
finished. Waiting for lower tickets alone therefore never deadlocks, in whatever order the GPU
starts programs and however many of them it holds at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

# for kernels that are launched directly: compiled code must not depend on numbers that the launch
# does not name, nor on where a tensor begins that the caller brings or that is a part of another
LIGHT = {
    "do_not_specialize": ["heads", "total"],
    "do_not_specialize_on_alignment": ["coeffs"],
}


@triton.jit
def take_ticket(counter):
    """The number of programs that came here before this one."""
    return tl.atomic_add(counter, 1, sem="relaxed")


@triton.jit
def wait_for(flag, least):
    """Wait until ``flag`` is ``least`` or more and return it; what its writer wrote is visible."""
    seen = tl.atomic_add(flag, 0, sem="acquire")
    while seen < least:
        seen = tl.atomic_add(flag, 0, sem="acquire")
    return seen


@triton.jit
def publish(flag, value):
    """Set ``flag`` after everything that any thread of this program has written so far."""
    tl.debug_barrier()
    tl.atomic_xchg(flag, value, sem="release")
