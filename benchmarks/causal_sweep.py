"""Causal filters in one sweep against plain attention and the present kernels, on the GPU at hand.

    PYTHONPATH=src python benchmarks/causal_sweep.py --seconds 150

First every candidate is compiled, in several processes, and checked against float64 on a short
sequence, once more against the present kernels at full size, and by a second run for equal bits.
Then the candidates of each shape are timed as CUDA graphs in interleaved rounds. A candidate that
fails, or says nothing for too long, is named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gfsa.operators.dense import DenseOperator
from gfsa.operators.fused import op
from gfsa.operators.fused.causal import plan as plans
from gfsa.operators.fused.causal import sweep
from gfsa.operators.fused.causal.plan import ColumnPlan, RowPlan
from gfsa.operators.fused.passes import Options


class Shape(NamedTuple):
    batch: int
    heads: int
    key_heads: int
    length: int
    head_dim: int

    def __str__(self) -> str:
        keys = "" if self.heads == self.key_heads else f"/{self.key_heads}"
        return f"B{self.batch} H{self.heads}{keys} n{self.length} d{self.head_dim}"


SHAPES = [
    Shape(4, 16, 16, 4096, 128),
    Shape(64, 8, 8, 1024, 64),
    Shape(8, 12, 12, 1024, 64),
    Shape(8, 32, 8, 2048, 128),
    Shape(16, 16, 16, 2048, 64),
    Shape(1, 16, 16, 32768, 128),
]
# relative errors against float64 that bf16 leaves
MOST = {"out": 0.006, "u": 0.006, "dq": 0.012, "dk": 0.012, "dv": 0.006, "dc": 0.006}
SILENCE_S = 60.0
PROCESSES = 8


def row_plans(head_dim: int) -> list[RowPlan]:
    cuts = {
        64: [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2)],
        128: [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3)],
    }[head_dim]
    return [RowPlan(*cut, wave) for cut in cuts for wave in (True, False)]


def column_plans(head_dim: int) -> list[tuple[ColumnPlan, ...]]:
    """One sweep at head dim 64, and two of half the work; at 128 one sweep as far as it fits."""
    found: list[tuple[ColumnPlan, ...]] = []
    if head_dim == 64:
        for cut in ((64, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 1)):
            found += [(ColumnPlan(*cut, True, chunk, atomic=True),) for chunk in (2, 4)]
            found += [(ColumnPlan(*cut, True, 4),)]
            found += [(ColumnPlan(*cut, False, atomic=atomic),) for atomic in (True, False)]
        pairs = [((128, 64, 8, 2), (128, 64, 8, 2)), ((64, 64, 4, 2), (64, 64, 4, 2))]
    else:
        for cut in ((64, 64, 8, 2), (64, 64, 8, 1)):
            found += [(ColumnPlan(*cut, wave, atomic=True),) for wave in (True, False)]
        pairs = [
            ((128, 64, 8, 2), (128, 64, 8, 2)),
            ((64, 64, 4, 2), (128, 64, 8, 1)),
            ((128, 64, 8, 3), (64, 64, 4, 2)),
            ((64, 64, 4, 3), (64, 64, 4, 1)),
        ]
    for values, scores in pairs:
        for wave in (True, False):
            found.append(
                (
                    ColumnPlan(*values, wave, scores=False),
                    ColumnPlan(*scores, wave, 4, values=False, atomic=True),
                )
            )
    return found


Plan = RowPlan | tuple[ColumnPlan, ...]


def name_of(plan: Plan) -> str:
    if isinstance(plan, RowPlan):
        return "fwd " + _cut(plan)
    return "bwd " + " + ".join(
        _cut(part)
        + (f" c{part.chunk}" if part.wave and part.scores else "")
        + ("" if part.scores else " values")
        + ("" if part.values else " scores")
        + (" red" if part.atomic else "")
        for part in plan
    )


def _cut(plan: RowPlan | ColumnPlan) -> str:
    order = "wave" if plan.wave else "head"
    return f"{plan.rows}x{plan.cols} w{plan.warps} s{plan.stages} {order}"


def candidates(shape: Shape) -> list[Plan]:
    """A program a head is hopeless where there are few heads."""
    few = shape.batch * shape.heads < 90
    every: list[Plan] = [*row_plans(shape.head_dim), *column_plans(shape.head_dim)]
    return [plan for plan in every if not (few and not _waves(plan))]


def _waves(plan: Plan) -> bool:
    return plan.wave if isinstance(plan, RowPlan) else plan[-1].wave


def tensors(shape: Shape, seed: int = 0) -> list[Tensor]:
    """q, k, v, the output's gradient and coefficients."""
    torch.manual_seed(seed)
    heads = (shape.heads, shape.key_heads, shape.key_heads, shape.heads)
    tokens = [
        torch.randn(shape.batch, h, shape.length, shape.head_dim, device="cuda").bfloat16()
        for h in heads
    ]
    coeffs = torch.tensor([0.3, 1.0, -0.6], device="cuda")
    return [*tokens, coeffs + 0.2 * torch.randn(shape.heads, 3, device="cuda")]


def error(got: Tensor, expected: Tensor) -> float:
    found = (got.double() - expected.double()).norm() / expected.double().norm()
    return float(found) if torch.isfinite(found) else float("inf")


def exact(given: list[Tensor], scale: float) -> dict[str, Tensor]:
    q, k, v, g, coeffs = given
    inputs = [x.double().requires_grad_() for x in (q, k, v, coeffs)]
    operator = DenseOperator.from_qk(inputs[0], inputs[1], None, True, scale)
    out = operator.polynomial(inputs[3], inputs[2])
    dq, dk, dv, dc = torch.autograd.grad(out, inputs, g.double())
    u = operator.apply(inputs[2])
    return {"out": out.detach(), "u": u.detach(), "dq": dq, "dk": dk, "dv": dv, "dc": dc}


def run(plan: Plan, given: list[Tensor], saved: list[Tensor], scale: float) -> dict[str, Tensor]:
    q, k, v, g, coeffs = given
    options = Options(scale, True)
    if isinstance(plan, RowPlan):
        out, u, _ = sweep.forward(q, k, v, coeffs, options, plan)
        return {"out": out, "u": u}
    u, out, lse = saved
    dq, dk, dv, parts = sweep.backward(g, q, k, v, u, out, lse, coeffs, options, plan)
    return {"dq": dq, "dk": dk, "dv": dv, "dc": parts.sum(2)}


def verdict(plan: Plan, given: list[Tensor], saved: list[Tensor], wanted: dict[str, Tensor]) -> str:
    """Empty, or what is wrong with a candidate's numbers."""
    scale = given[0].shape[3] ** -0.5
    got, again = (run(plan, given, saved, scale) for _ in range(2))
    torch.cuda.synchronize()
    errors = {name: error(x, wanted[name]) for name, x in got.items()}
    wrong = [f"{name} {found:.1e}" for name, found in errors.items() if not found <= MOST[name]]
    if wrong:
        return "wrong: " + ", ".join(wrong)
    differs = [name for name, x in got.items() if not torch.equal(x, again[name])]
    return "differs from run to run: " + ", ".join(differs) if differs else ""


def saved_by_present(given: list[Tensor]) -> list[Tensor]:
    q, k, v, _, coeffs = given
    scale = q.shape[3] ** -0.5
    out, u, lse = op._forward(q, k, v, coeffs, None, None, 0.0, True, scale)
    return [u, out, lse]


def say(*words: Any) -> None:
    print(*words, flush=True)


# what the processes of their own do


def check(part: int, of: int) -> None:
    """Compile and check a part of all candidates on short sequences."""
    kinds = {(s.head_dim, s.heads // s.key_heads) for s in SHAPES}
    jobs = [
        (head_dim, group, plan)
        for head_dim, group in sorted(kinds)
        for plan in (*row_plans(head_dim), *column_plans(head_dim))
    ]
    for head_dim, group, plan in jobs[part::of]:
        key = f"{head_dim}/{group} {name_of(plan)}"
        say("START", key)
        try:
            shape = Shape(2, 4 * group, 4, 464, head_dim)
            given = tensors(shape)
            saved = saved_by_present(given)
            start = time.perf_counter()
            found = verdict(plan, given, saved, exact(given, head_dim**-0.5))
            say("BAD" if found else "GOOD", key, found, f"({time.perf_counter() - start:.0f} s)")
        except Exception as problem:
            say("BAD", key, f"{type(problem).__name__}: {str(problem)[:160]!r}")
            if "CUDA error" in str(problem):
                # this process can do no more
                raise SystemExit(3) from None


@triton.jit
def hold(x, nanoseconds, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keep a multiprocessor busy: so many registers that nothing else fits beside it."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    kept = tl.load(x + at)
    start = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - start < nanoseconds:
        pass
    tl.store(x + at, kept + 1.0)


def hang_tests() -> None:
    """Far more blocks than multiprocessors, and half of them held by another kernel."""
    for head_dim in (64, 128):
        shape = Shape(2, 8, 8, 16384, head_dim)
        given = tensors(shape)
        saved = saved_by_present(given)
        scale = head_dim**-0.5
        wanted = present(given, saved)
        half = torch.cuda.get_device_properties(0).multi_processor_count // 2
        x = torch.zeros(half, 32768, device="cuda")
        side = torch.cuda.Stream()
        for plan in (plans.row_plan(head_dim, True), plans.column_plans(head_dim, True)):
            for held in (False, True):
                key = f"hang d{head_dim} {name_of(plan)} {'half held' if held else 'many blocks'}"
                say("START", key)
                run(plan, given, saved, scale)
                torch.cuda.synchronize()
                start = time.perf_counter()
                if held:
                    with torch.cuda.stream(side):
                        hold[(half,)](x, 200_000_000, SIZE=32768, num_warps=32)
                    time.sleep(0.005)
                got = run(plan, given, saved, scale)
                torch.cuda.current_stream().synchronize()
                took = time.perf_counter() - start
                torch.cuda.synchronize()
                errors = {name: error(y, wanted[name]) for name, y in got.items()}
                fine = all(found <= 2 * MOST[name] for name, found in errors.items())
                say("GOOD" if fine else "BAD", key, f"{took * 1e3:.1f} ms", errors)


def present(given: list[Tensor], saved: list[Tensor]) -> dict[str, Tensor]:
    q, k, v, g, coeffs = given
    u, out, lse = saved
    rest = (None, None, 0.0, True, q.shape[3] ** -0.5)
    dq, dk, dv, dc = op._backward(g, q, k, v, u, out, lse, coeffs, *rest)
    return {"out": out, "u": u, "dq": dq, "dk": dk, "dv": dv, "dc": dc}


def graph_of(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def sample(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def interleaved(works: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Median milliseconds of each, a round after the other until the time is over."""
    start = time.perf_counter()
    graphs = {name: graph_of(work) for name, work in works.items()}
    once = {name: sample(graph, 1) for name, graph in graphs.items()}
    repeats = {name: min(50, max(2, int(4.0 / ms))) for name, ms in once.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    rounds = 0
    while rounds < 3 or (time.perf_counter() - start < seconds and rounds < 15):
        names = list(graphs)
        for name in names[rounds % len(names) :] + names[: rounds % len(names)]:
            samples[name].append(sample(graphs[name], repeats[name]))
        rounds += 1
    return {name: statistics.median(values) for name, values in samples.items()}


def plain_works(given: list[Tensor]) -> dict[str, Callable[[], Any]]:
    q, k, v, g, _ = given
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    grouped = q.shape[1] != k.shape[1]

    def attend(tokens: list[Tensor]) -> Tensor:
        return F.scaled_dot_product_attention(*tokens, is_causal=True, enable_gqa=grouped)

    return {
        "plain fwd": lambda: attend([q, k, v]),
        "plain f+b": lambda: torch.autograd.grad(attend(inputs), inputs, g),
    }


def time_shape(shape: Shape, good: set[str], skip: set[str], seconds: float) -> None:
    given = tensors(shape)
    q, k, v, *_ = given
    scale, group = shape.head_dim**-0.5, shape.heads // shape.key_heads
    grouped = group > 1
    backend = torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=grouped)
    say(f"SHAPE {shape}; torch chooses backend {backend} for plain attention")
    works = plain_works(given)
    saved = saved_by_present(given)
    wanted = present(given, saved)
    works["present fwd"] = lambda: saved_by_present(given)
    works["present bwd"] = lambda: present(given, saved)
    for plan in candidates(shape):
        key = f"{shape} {name_of(plan)}"
        if f"{shape.head_dim}/{group} {name_of(plan)}" not in good or key in skip:
            continue
        say("START", key)
        try:
            found = verdict(plan, given, saved, wanted)
        except torch.OutOfMemoryError as problem:
            found = str(problem)[:100]
        if found:
            say("BAD", key, found)
            continue
        works[name_of(plan)] = lambda plan=plan: run(plan, given, saved, scale)
    say("START", f"{shape} timing of {len(works)}")
    took = interleaved(works, seconds)
    forwards = {name: ms for name, ms in took.items() if name.startswith(("fwd", "present fwd"))}
    backwards = {name: ms for name, ms in took.items() if name.startswith(("bwd", "present bwd"))}
    plain_fwd, plain = took["plain fwd"], took["plain f+b"]
    say(f"TABLE {shape}: plain {plain_fwd:.4f} / {plain:.4f} ms (fwd / fwd+bwd)")
    for name, ms in sorted(forwards.items(), key=lambda item: item[1]):
        say(f"  {ms:9.4f} ms  {ms / plain_fwd:5.2f}x plain fwd   {name}")
    for name, ms in sorted(backwards.items(), key=lambda item: item[1]):
        say(f"  {ms:9.4f} ms  {ms / (plain - plain_fwd):5.2f}x plain bwd   {name}")
    best = min(forwards.values()) + min(backwards.values())
    today = took["present fwd"] + took["present bwd"]
    say(f"BEST {shape}: fwd+bwd {best / plain:.3f}x plain (present {today / plain:.3f}x), "
        f"fwd {min(forwards.values()) / plain_fwd:.3f}x")  # fmt: skip


def time_shapes(good: set[str], skip: set[str], indices: list[int], seconds: float) -> None:
    end = time.perf_counter() + seconds
    for position, index in enumerate(indices):
        left = (end - time.perf_counter()) / (len(indices) - position)
        say("INDEX", index)
        time_shape(SHAPES[index], good, skip, max(1.0, left * 0.6))
        torch.cuda.empty_cache()


# the process that watches them


def lines_of(arguments: list[str], silence: float) -> Iterator[str]:
    """What a process of its own says; it is ended when it says nothing for too long."""
    command = [sys.executable, __file__, *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    said: queue.Queue[str | None] = queue.Queue()

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.put(line.rstrip())
        said.put(None)

    threading.Thread(target=listen, daemon=True).start()
    try:
        while True:
            try:
                line = said.get(timeout=silence)
            except queue.Empty:
                yield f"SILENT for {silence:.0f} s"
                return
            if line is None:
                yield f"END {process.wait()}"
                return
            yield line
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def watch_checks(parts: int) -> tuple[set[str], list[str]]:
    good: set[str] = set()
    bad: list[str] = []
    lock = threading.Lock()

    def follow(part: int) -> None:
        at = ""
        for line in lines_of(["--check", str(part), str(parts)], SILENCE_S):
            word, _, rest = line.partition(" ")
            with lock:
                if word == "START":
                    at = rest
                elif word == "GOOD":
                    good.add(rest[: rest.rindex(" (")].strip())
                elif word in ("BAD", "SILENT") or (word == "END" and rest != "0"):
                    bad.append(f"{line} [{at}]")
                    say("  ", line, f"[at {at}]" if word != "BAD" else "")

    threads = [threading.Thread(target=follow, args=(part,)) for part in range(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return good, bad


def watch_times(good: set[str], indices: list[int], end: float) -> None:
    skip: list[str] = []
    left = list(indices)
    while left and time.perf_counter() < end:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({"good": sorted(good), "skip": skip, "indices": left}, file)
            file.flush()
            seconds = end - time.perf_counter()
            at = ""
            for line in lines_of(["--time", file.name, str(seconds)], 30.0):
                word, _, rest = line.partition(" ")
                if word == "START":
                    at = rest
                elif word == "INDEX":
                    left = left[left.index(int(rest)) :]
                else:
                    say(line)
                if word == "BEST":
                    left = left[1:]
                if word == "SILENT" or (word == "END" and rest != "0"):
                    say("   left out:", at)
                    skip.append(at)
                    if " timing of " in at:
                        left = left[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=150.0, help="for all of it")
    parser.add_argument("--shapes", type=int, nargs="*", default=list(range(len(SHAPES))))
    parser.add_argument("--no-hang-tests", action="store_true")
    parser.add_argument("--check", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--hang", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--time", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        check(*options.check)
    elif options.hang:
        hang_tests()
    elif options.time:
        with open(options.time[0]) as file:
            job = json.load(file)
        time_shapes(set(job["good"]), set(job["skip"]), job["indices"], float(options.time[1]))
    else:
        watch(options.seconds, options.shapes, not options.no_hang_tests)


def watch(seconds: float, shapes: list[int], hang: bool) -> None:
    start = time.perf_counter()
    say(torch.cuda.get_device_name(), "torch", torch.__version__)
    good, bad = watch_checks(min(PROCESSES, os.cpu_count() or 1))
    say(f"{len(good)} candidates are right, {len(bad)} are not "
        f"({time.perf_counter() - start:.0f} s)")  # fmt: skip
    if hang:
        for line in lines_of(["--hang"], 30.0):
            if not line.startswith("START"):
                say(line)
    watch_times(good, shapes, start + seconds)
    say(f"done after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
