"""Peak memory of one call: the most that was alive at once, beyond what was alive before it."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import accumulate

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

MIB = 2**20


def peak_mib(work: Callable[[], object], device: torch.device) -> float:
    """The peak of ``work`` in MiB; inputs do not count, outputs and gradients do.

    On CUDA this is ``torch.cuda.max_memory_allocated``. A CPU keeps no such account, so there it
    is the highest sum of the allocations and releases that torch's profiler records during the
    call: exact to the byte, the same whatever else the machine does, and blind only to what a
    library (BLAS, say) keeps for itself. The resident set of the process would count that too, but
    also memory that the allocator holds back from earlier calls.
    """
    work()
    return (_cuda_peak(work, device) if device.type == "cuda" else _cpu_peak(work)) / MIB


def _cuda_peak(work: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = work()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(work: Callable[[], object]) -> int:
    # the profiler of a CUDA build complains on stderr where there is no GPU
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recorded:
        # held until recording has stopped, so that the result counts as alive
        result = work()
    del result
    profiler = recorded.profiler
    assert profiler is not None
    assert profiler.kineto_results is not None
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    )
    return max(accumulate((size for _, size in changes), initial=0))
