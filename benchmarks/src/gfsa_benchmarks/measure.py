"""Measures a case: times in interleaved rounds, peak memory, and a row for each variant.

Interleaved, disturbances affect every variant alike.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import gfsa
from gfsa.environment import commit, device_name, version_of
from gfsa_benchmarks.case import MIB, Case, Setting
from gfsa_experiments.runs.row import append_lines

Work = Callable[[], object]

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
    sample_ms: float,
    on_round: Callable[[], None] = lambda: None,
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


@dataclass(frozen=True)
class Row:
    """One line of ``results/bench.csv``.

    ``ratio`` columns are relative to the case's first variant, measured in the same rounds. Memory
    is that of forward+backward (of the forward if there is no backward).
    """

    date: str
    commit: str
    command: str
    device: str
    python: str
    gfsa: str
    torch: str
    cuda: str
    triton: str
    suite: str
    shape: str
    dtype: str
    variant: str
    backend: str
    timing: str
    rounds: int
    fwd_ms: float
    fwd_bwd_ms: float | None
    fwd_bwd_lower_ms: float | None
    fwd_bwd_upper_ms: float | None
    fwd_ratio: float | None
    fwd_bwd_ratio: float | None
    peak_mib: float
    extra_mib: float


COLUMNS = tuple(field.name for field in fields(Row))


def measure(
    case: Case,
    suite: str,
    setting: Setting,
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> list[Row]:
    """A row for each variant of ``case``.

    Args:
        rounds: how often each variant is timed; medians are reported.
        on_round: called after each round, ``2·rounds`` times in all: first for the forward, then
            for forward+backward.
    """

    def timed(works: Sequence[Work | None]) -> list[Timing | None]:
        calls = [work for work in works if work is not None]
        if setting.graphs:
            calls = [captured(work) for work in calls]
        device = setting.device
        timings = iter(interleaved(calls, rounds, device, case.sample_ms, on_round))
        return [None if work is None else next(timings) for work in works]

    forwards = timed([variant.forward for variant in case.variants])
    steps = timed([variant.step for variant in case.variants])
    peaks = [peak_mib(v.step or v.forward, setting.device) for v in case.variants]
    shared: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "command": _command(sys.argv),
        "device": device_name(setting.device),
        "python": platform.python_version(),
        "gfsa": gfsa.__version__,
        "torch": torch.__version__,
        "cuda": (torch.version.cuda or "") if setting.device.type == "cuda" else "",
        "triton": version_of("triton") or "",
        "suite": suite,
        "shape": case.shape,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "timing": setting.timing,
        "rounds": rounds,
    }
    rows = []
    for variant, forward, step, peak in zip(case.variants, forwards, steps, peaks, strict=True):
        assert forward is not None
        rows.append(
            Row(
                **shared,
                variant=variant.name,
                backend=variant.backend,
                fwd_ms=forward.median,
                fwd_bwd_ms=step.median if step else None,
                fwd_bwd_lower_ms=step.lower if step else None,
                fwd_bwd_upper_ms=step.upper if step else None,
                fwd_ratio=_ratio(forward, forwards[0]),
                fwd_bwd_ratio=_ratio(step, steps[0]),
                peak_mib=peak,
                extra_mib=peak - peaks[0],
            )
        )
    return rows


def append(rows: Sequence[Row], path: Path) -> None:
    """Append ``rows`` to the CSV file at ``path``, which is created with a header if missing."""
    lines = [{name: _text(value) for name, value in asdict(row).items()} for row in rows]
    append_lines(path, COLUMNS, lines, end="\n")


def _command(arguments: Sequence[str]) -> str:
    """The command line without the paths of the program and its output file."""
    kept = list(arguments[1:])
    kept = [word for word in kept if not word.startswith("--csv=")]
    if "--csv" in kept:
        at = kept.index("--csv")
        del kept[at : at + 2]
    # `python -m gfsa bench` and `python -m gfsa_benchmarks` are the same program
    path = Path(arguments[0])
    if path.parts[-2:] == ("gfsa_benchmarks", "__main__.py"):
        kept = ["bench", *kept]
    return shlex.join([path.name.replace("__main__.py", "gfsa"), *kept])


def _ratio(timing: Timing | None, reference: Timing | None) -> float | None:
    return timing.median / reference.median if timing and reference else None


def _text(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value
