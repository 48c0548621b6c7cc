"""What the scripts share that time a kernel by its tiles, warps and numbers of programs.

Such a script has candidates for each shape. All are compiled first, several at a time, into
Triton's cache on disk; then each is captured, and their replays are timed by turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from gfsa_benchmarks.case import Shape
from gfsa_benchmarks.timing import Work, captured, interleaved

WORKERS = 10
ROUNDS = 5


class Candidate(NamedTuple):
    """A way to run a kernel.

    Args:
        label: its name in what is printed.
        prepare: makes the call that is timed; a candidate that does not fit on the GPU fails there
            or in the call.
    """

    label: str
    prepare: Callable[[], Work]


def compiled(candidates: Sequence[Candidate], heading: str) -> None:
    """Run each candidate once; one that fails is left out by :func:`times` later."""
    for label, prepare in candidates:
        try:
            prepare()()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{heading} {label} does not run: {error!r}"[:300], flush=True)


def times(
    candidates: Sequence[Candidate], heading: str, rounds: int, calls: int = 1
) -> list[tuple[str, float]]:
    """Labels and microseconds of a call, of the candidates that run.

    Args:
        calls: how many calls of the kernel one call of a candidate is.
    """
    graphs, labels = [], []
    for label, prepare in candidates:
        try:
            graphs.append(captured(prepare()))
        except Exception as error:
            # most often too large for the GPU's shared memory
            print(f"{heading} {label} left out: {type(error).__name__}", flush=True)
            continue
        labels.append(label)
    found = interleaved(graphs, rounds, torch.device("cuda"))
    return [(label, time.median * 1e3 / calls) for label, time in zip(labels, found, strict=True)]


def report(rows: Sequence[tuple[str, float]], heading: str, reference: float) -> None:
    """A line for each row, with its ratio to ``reference`` microseconds."""
    for label, taken in rows:
        print(f"{heading} {label:32} {taken:9.2f} µs {taken / reference:6.3f}", flush=True)


def run(
    about: str | None,
    cases: Callable[[Shape], Sequence[Any]],
    compile_case: Callable[[Any], None],
    measure: Callable[[Shape, int], None],
) -> None:
    """The command line of a script.

    Args:
        about: the script's docstring.
        cases: parts of a shape's candidates, which are compiled in processes of their own.
        compile_case: compiles one of them; a function of the script, which the processes import.
        measure: prints the times of a shape's candidates, from so many rounds.
    """
    parser = argparse.ArgumentParser(description=(about or "").strip().partition("\n")[0])
    parser.add_argument("shapes", nargs="+", type=_shape, metavar="SHAPE")
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes that compile")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    start = time.perf_counter()
    work = [case for shape in given.shapes for case in cases(shape)]
    with multiprocessing.get_context("spawn").Pool(min(given.workers, len(work))) as pool:
        pool.map(compile_case, work, chunksize=1)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    for shape in given.shapes:
        measure(shape, given.rounds)
    print(f"{time.perf_counter() - start:.0f} s", flush=True)


def _shape(text: str) -> Shape:
    try:
        return Shape.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
