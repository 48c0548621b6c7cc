"""Times in interleaved rounds, so that disturbances affect every variant alike, and peak memory."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Work = Callable[[], object]
MIB = 2**20

# calls are repeated within a sample until it is this long: clocks and launches are noisy
SHORTEST_SAMPLE_MS = 10.0
# where a model decodes: as in use, hundreds of calls follow each other, and the first ones after
# another variant count for little
DECODING_SAMPLE_MS = 100.0
# the least number of calls in a sample on a GPU, after one that is not counted: in training the
# host's caches are warm because the step before ran the same code
LEAST_CALLS = 4


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: the median over rounds and its quartiles."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        if len(samples) < 2:
            return cls(samples[0], samples[0], samples[0])
        lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, lower, upper)


def interleaved(
    works: Sequence[Work],
    rounds: int,
    device: torch.device,
    on_round: Callable[[], None] = lambda: None,
    sample_ms: float = SHORTEST_SAMPLE_MS,
) -> list[Timing]:
    """Time each of ``works`` once per round, in an order that rotates from round to round.

    Args:
        sample_ms: how long a work is repeated in its turn, at least.
    """
    on_gpu = device.type == "cuda"
    sample, least = (_cuda_sample, LEAST_CALLS) if on_gpu else (_cpu_sample, 1)
    for work in works:
        # the first call includes compilation, allocation and the choice of kernels
        sample(work, 1)
    samples: list[list[float]] = [[] for _ in works]
    repeats = [max(least, math.ceil(sample_ms / max(sample(work, least), 1e-4))) for work in works]
    for turn in range(rounds):
        for position in range(len(works)):
            index = (position + turn) % len(works)
            samples[index].append(sample(works[index], repeats[index]))
        on_round()
    return [Timing.of(of_work) for of_work in samples]


def captured(work: Work) -> Work:
    """``work`` as a CUDA graph: a replay has no launch overhead, which matters to short kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay(work: Work = work) -> None:
        # with the work it keeps its tensors: the next capture gives free memory back to the GPU,
        # and a replay would read addresses that are no longer there
        graph.replay()

    return replay


def _cpu_sample(work: Work, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) * 1e3 / repeats


def _cuda_sample(work: Work, repeats: int) -> float:
    work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def peak_mib(work: Work, device: torch.device) -> float:
    """The peak of ``work`` in MiB; inputs do not count, outputs and gradients do.

    On CUDA this is ``torch.cuda.max_memory_allocated``. There is no such counter for a CPU; there
    it is the highest sum of the allocations and releases that torch's profiler records during the
    call: exact to the byte and independent of other processes, but without memory that a library
    such as BLAS allocates itself. The resident set of the process would include that, but also
    memory that the allocator caches from earlier calls.
    """
    work()
    return (_cuda_peak(work, device) if device.type == "cuda" else _cpu_peak(work)) / MIB


def _cuda_peak(work: Work, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = work()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(work: Work) -> int:
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
