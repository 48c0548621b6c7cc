"""Where the time of a compiled token with a static cache goes: host, guards, kernels.

    python benchmarks/decode_host.py 1x12x1024x64
    python benchmarks/decode_host.py 1x2x40x8 --variants plain gfsa          # a trial, on a CPU
    python benchmarks/decode_host.py 1x12x1024x64 --pause $(cat runs/pid)    # beside training

For each variant of the suite ``decode-static``, compiled as ``gfsa bench --compile`` compiles it:
the time of a token where calls follow each other, the same without torch's guards, the time after
which the call returns to a host that has nothing to wait for, and what a profiler saw on the GPU.
A token that takes longer than its kernels waits for the host. Each variant has a process of its
own: what one has compiled would make the checks of the next slower.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gfsa_benchmarks import decode
from gfsa_benchmarks.case import Setting, Shape
from gfsa_benchmarks.pause import check_pausable, paused

ANYWHERE = ("plain", "gfsa degree 1", "gfsa")
VARIANTS = (*ANYWHERE, "gfsa degree 1 kernel", "gfsa kernel")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def fastest_ms(step: Callable[[], object], calls: int, alone: bool, rounds: int = 7) -> float:
    """A call's time in ms, the fastest of some rounds; ``alone``: until it returns, on an idle GPU.

    The fastest because other processes on the host make a call slower, and none makes it faster.
    """
    found = []
    for _ in range(rounds):
        spent = 0.0
        synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            started = time.perf_counter()
            step()
            if alone:
                spent += time.perf_counter() - started
                synchronize()
        synchronize()
        found.append((spent if alone else time.perf_counter() - begin) / calls * 1e3)
    return min(found)


def profiled(step: Callable[[], object], calls: int) -> str:
    """What a profiler saw of a token: on a GPU, if there is one, and on the host."""
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        for _ in range(calls):
            step()
        synchronize()
    seen = on_gpu(profiler, calls) if cuda else "no GPU: the host computes, too"
    return f"{seen}\n{on_host(profiler, calls)}"


def on_host(profiler: profile, calls: int, listed: int = 12) -> str:
    """The self time of the host's calls, slowest first; profiling makes all of them slower."""
    spent = {
        event.key: event.self_cpu_time_total / calls
        for event in profiler.key_averages()
        # the wait for the GPU after the last call is not the host's work
        if event.device_type == DeviceType.CPU and "Synchronize" not in event.key
    }
    lines = [f"host {sum(spent.values()) / 1e3:.3f} ms while it was profiled"]
    slowest = sorted(spent.items(), key=lambda item: -item[1])[:listed]
    lines += [f"    {time:7.1f} µs  {name[:90]}" for name, time in slowest]
    return "\n".join(lines)


def on_gpu(profiler: profile, calls: int, listed: int = 12) -> str:
    """Kernels, and copies and fills of memory, that a profiler saw for a token.

    Args:
        listed: how many kernels get a line of their own, those that take most time together.
    """
    graphs = 0
    spent: dict[str, list[float]] = {}
    for event in profiler.events():
        graphs += event.name == "cudaGraphLaunch"
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            spent.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e3)
    ran = sum(map(len, spent.values()))
    busy = sum(map(sum, spent.values()))
    each = f"{ran / graphs:.1f} kernels in each" if graphs else "none was captured"
    lines = [
        f"GPU busy {busy / calls:.3f} ms, {ran / calls:.1f} kernels; "
        f"{graphs / calls:.1f} graphs launched, {each}"
    ]
    slowest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:listed]
    for name, times in slowest:
        total, count = sum(times) / calls * 1e3, len(times) / calls
        lines.append(f"    {total:7.1f} µs, {count:5.1f} × {total / count:5.1f}  {name[:90]}")
    return "\n".join(lines)


def measure(shape: Shape, name: str, calls: int, pause: int | None) -> str:
    cuda = torch.cuda.is_available()
    kind = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    setting = Setting(torch.device(kind[0]), kind[1], compiled="model")
    case = decode.decode_static(shape, setting)
    step = next(variant.forward for variant in case.variants if variant.name == name)
    # compiled, warmed up, recorded, replayed
    for _ in range(5):
        step()
    with paused(pause):
        times = [fastest_ms(step, calls, alone=False), fastest_ms(step, calls, alone=True)]
        seen = profiled(step, calls)
        # last, because the first guards after it are slow
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
            unguarded = fastest_ms(step, calls, alone=False)
    return (
        f"{name:20s} {times[0]:.3f} ms a token, {unguarded:.3f} without guards; "
        f"a call returns after {times[1]:.3f} ms; {seen}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "shape", type=Shape.parse, help="of each layer's cache, such as 1x12x1024x64"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=None)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--pause", type=int, help="a process that is stopped while times are taken")
    given = parser.parse_args()
    if given.pause is not None:
        check_pausable(given.pause)
    some = VARIANTS if torch.cuda.is_available() else ANYWHERE
    names = given.variants or some
    if len(names) == 1:
        print(measure(given.shape, names[0], given.calls, given.pause), flush=True)
        return
    for name in names:
        own = [str(given.shape), "--variants", name, "--calls", str(given.calls)]
        if given.pause is not None:
            own += ["--pause", str(given.pause)]
        subprocess.run([sys.executable, __file__, *own], check=True)


if __name__ == "__main__":
    main()
