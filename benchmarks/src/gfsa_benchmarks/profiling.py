"""Where the GPU time of a step goes: by kernel, by kind of kernel, and while nothing runs."""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STEPS = 5
# kernels of the second table: those whose times differ most
MOST_KERNELS = 14

IDLE = "idle: no kernel runs"
ATTENTION = "attention"
COEFFICIENTS = "coefficients of filters"
COMPILED = "kernels of the compiler"
OTHER = "other"

# kinds in the order of the table; the first pattern that a kernel's name matches decides
_KINDS = (
    # first: their names tell what is fused in them, attention's casts among others
    (COMPILED, r"^triton_"),
    # cuDNN's gradient of attention has kernels of other names besides; there are no convolutions
    (ATTENTION, r"sdpa|fmha|flash|attention|cudnn"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|cublas|splitk|gemv"),
    ("optimizer and clipping", r"multi_tensor|adam|lpnorm"),
    ("copies and casts", r"^mem(cpy|set)|copy|catarray|fill"),
)
_COEFFICIENT_KERNELS = ("fold", "unfold", "add_parts")


@dataclass(frozen=True)
class Kernel:
    """One kernel that ran, in nanoseconds of the GPU's clock."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Spent:
    """Milliseconds of a step, and how often something ran in it."""

    ms: float
    launches: float


@dataclass(frozen=True)
class Profile:
    """The GPU time of one step, the mean of several."""

    kinds: Mapping[str, Spent]
    kernels: Mapping[str, Spent]
    ms: float
    """From the first kernel's start to the last one's end."""


def profile_step(step: Callable[[], object], device: torch.device) -> Profile:
    """Profile ``step``, which has run before."""
    step()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize(device)
    profiler = recorded.profiler
    assert profiler is not None
    assert profiler.kineto_results is not None
    ran = [
        Kernel(event.name(), event.start_ns(), event.end_ns())
        for event in profiler.kineto_results.events()
        # annotations span the kernels that were launched within them
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]
    return summarised(ran, STEPS, own_kernels())


def summarised(ran: Sequence[Kernel], steps: int, own: Iterable[str]) -> Profile:
    """The profile of ``steps`` steps in which ``ran`` ran.

    Where kernels overlap, each has its own time, so that kinds may add up to more than the step.

    Args:
        own: names of this library's kernels.
    """
    if not ran:
        raise RuntimeError(
            "the profiler recorded no kernel: CUPTI may be missing, or in use by another profiler"
        )
    own = frozenset(own)
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    kernels: defaultdict[str, list[int]] = defaultdict(list)
    for kernel in ran:
        kinds[kind_of(kernel.name, own)].append(kernel.end - kernel.start)
        kernels[_unnumbered(kernel.name)].append(kernel.end - kernel.start)
    idle, end = 0, min(kernel.start for kernel in ran)
    first = end
    for kernel in sorted(ran, key=lambda kernel: kernel.start):
        idle += max(0, kernel.start - end)
        end = max(end, kernel.end)
    spent = {name: _spent(times, steps) for name, times in kinds.items()}
    return Profile(
        kinds=spent | {IDLE: Spent(idle / 1e6 / steps, 0)},
        kernels={name: _spent(times, steps) for name, times in kernels.items()},
        ms=(end - first) / 1e6 / steps,
    )


def _spent(times: Sequence[int], steps: int) -> Spent:
    return Spent(sum(times) / 1e6 / steps, len(times) / steps)


def _unnumbered(name: str) -> str:
    """The compiler numbers its kernels, so that one kernel has two names in two models."""
    return re.sub(r"_\d+$", "", name) if name.startswith("triton_") else name


def kind_of(name: str, own: Iterable[str]) -> str:
    """The kind of a kernel, by its name."""
    if name in own:
        return COEFFICIENTS if name in _COEFFICIENT_KERNELS else ATTENTION
    for kind, pattern in _KINDS:
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return OTHER


def own_kernels() -> set[str]:
    """Names of this library's Triton kernels, in the modules that are imported."""
    package = "gfsa.kernels"
    modules = [module for name, module in sys.modules.items() if name.startswith(package)]
    functions = [getattr(x, "fn", None) for module in modules for x in vars(module).values()]
    return {
        function.__name__
        for function in functions
        if inspect.isfunction(function) and function.__module__.startswith(package)
    }


def kinds_table(profiles: Mapping[str, Profile]) -> Table:
    """Milliseconds and launches by kind of kernel; differences are to the first variant."""
    order = [*(kind for kind, _ in _KINDS), COEFFICIENTS, OTHER, IDLE]
    shown = _table(f"GPU time of a step, mean of {STEPS}", "kind", profiles)
    for kind in order:
        rows = [profile.kinds.get(kind, Spent(0.0, 0)) for profile in profiles.values()]
        if any(spent.ms for spent in rows):
            shown.add_row(kind, *_cells(rows))
    totals = [
        Spent(profile.ms, sum(spent.launches for spent in profile.kernels.values()))
        for profile in profiles.values()
    ]
    shown.add_section()
    shown.add_row("step", *_cells(totals))
    return shown


def kernels_table(profiles: Mapping[str, Profile]) -> Table:
    """The kernels whose times differ most from the first variant's."""
    first, *others = profiles.values()
    nothing = Spent(0.0, 0)

    def difference(name: str) -> float:
        before = first.kernels.get(name, nothing).ms
        return max((abs(o.kernels.get(name, nothing).ms - before) for o in others), default=before)

    names = {name for profile in profiles.values() for name in profile.kernels}
    shown = _table("kernels whose times differ most", "kernel", profiles)
    for name in sorted(names, key=difference, reverse=True)[:MOST_KERNELS]:
        rows = [profile.kernels.get(name, nothing) for profile in profiles.values()]
        shown.add_row(_short(name), *_cells(rows))
    return shown


def _table(title: str, rows: str, profiles: Mapping[str, Profile]) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column(rows, no_wrap=True)
    for place, name in enumerate(profiles):
        shown.add_column(f"{name}\nms", justify="right")
        shown.add_column("launches", justify="right")
        if place:
            shown.add_column("+ ms", justify="right")
    return shown


def _cells(rows: Sequence[Spent]) -> list[str]:
    cells = []
    for place, spent in enumerate(rows):
        cells += [f"{spent.ms:.3f}", f"{spent.launches:.4g}"]
        if place:
            cells.append(f"{spent.ms - rows[0].ms:+.3f}")
    return cells


def _short(name: str, most: int = 48) -> str:
    """Template arguments tell kernels apart least: the beginning of a name is kept."""
    name = name.removeprefix("void ")
    return name if len(name) <= most else f"{name[: most - 1]}…"
