"""Peak memory of one call, beyond the memory that was allocated before it."""

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

    On CUDA this is ``torch.cuda.max_memory_allocated``. There is no such counter for a CPU; there
    it is the highest sum of the allocations and releases that torch's profiler records during the
    call: exact to the byte and independent of other processes, but without memory that a library
    such as BLAS allocates itself. The resident set of the process would include that, but also
    memory that the allocator caches from earlier calls.
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
    # without a GPU the profiler of a CUDA build prints errors to stderr
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recorded:
        # keep a reference until the recording stops, so that the result counts
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
