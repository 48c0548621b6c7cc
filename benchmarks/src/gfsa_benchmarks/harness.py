"""Measures a case: times in interleaved rounds, then the peak memory of each variant."""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

import gfsa
from gfsa.environment import commit, device_name, version_of
from gfsa_benchmarks.case import Case, Setting
from gfsa_benchmarks.timing import Timing, Work, captured, interleaved, peak_mib
from gfsa_experiments.runs.csv_table import append_lines


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
        timings = iter(interleaved(calls, rounds, device, on_round, case.sample_ms))
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
