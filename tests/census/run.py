"""Run the census: ``python -m census.run`` from the folder ``tests``.

Entries are dealt out to worker processes. A worker that dies or hangs costs one entry: it is
recorded as a failure, and another worker takes over.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import queue
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from multiprocessing.connection import Connection

from census import page
from census.verdict import GOOD, Finding, Verdict

TIME_LIMIT = 300
"""Seconds for one entry; the parent waits half a minute longer, then ends the worker."""
MEMORY_LIMIT = 8 << 30


def worker(parent: Connection) -> None:
    """Answer each name with a verdict."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    # models and libraries print
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import warnings

    import torch
    import transformers

    from census.catalogue import entries
    from census.check import examine

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _out_of_time)
    known = {entry.name: entry for entry in entries()}
    gc.freeze()
    while name := parent.recv():
        begun = time.perf_counter()
        signal.alarm(TIME_LIMIT)
        try:
            verdict = examine(known[name])
        except TimeoutError:
            verdict = failed(name, f"did not finish in {TIME_LIMIT} s")
        finally:
            signal.alarm(0)
        verdict.seconds = round(time.perf_counter() - begun, 2)
        parent.send(verdict)
        # the collector need not look again at what was imported for this entry
        gc.collect()
        gc.freeze()


def _out_of_time(*_: object) -> None:
    raise TimeoutError


def failed(name: str, reason: str) -> Verdict:
    return Verdict(name, findings={"default": Finding("crash", reason)})


class Worker:
    """A process that examines entries one after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=worker, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def examine(self, name: str) -> Verdict:
        try:
            self.connection.send(name)
            if self.connection.poll(TIME_LIMIT + 30):
                verdict: Verdict = self.connection.recv()
                return verdict
            reason = f"hangs: ended after {TIME_LIMIT + 30} s"
        except (EOFError, OSError):
            self.process.join()
            reason = f"the process ended with {self.process.exitcode}"
        self.end()
        return failed(name, reason)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def run(names: Iterable[str], processes: int) -> list[Verdict]:
    """Verdicts for all names, in their order."""
    names = list(names)
    workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for _ in range(processes):
        workers.put(Worker())

    def examine(name: str) -> Verdict:
        current = workers.get()
        verdict = current.examine(name)
        workers.put(current if current.process.is_alive() else Worker())
        return verdict

    with ThreadPoolExecutor(processes) as threads:
        verdicts = list(threads.map(examine, names))
    for _ in range(processes):
        workers.get().end()
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="entries such as transformers:bert (default all)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write the table of docs/supported.md")
    arguments = parser.parse_args()
    from census.catalogue import entries

    begun = time.perf_counter()
    names = arguments.names or [entry.name for entry in entries()]
    verdicts = run(names, arguments.processes)
    if arguments.write:
        versions = {name: metadata.version(name) for name in ("transformers", "timm")}
        page.write(page.section(verdicts, versions))
    findings = [(v, mode, f) for v in verdicts for mode, f in v.findings.items()]
    for v, mode, f in findings:
        if f.status not in GOOD:
            print(f"{v.name} ({v.model}), {mode}: {f.status}: {f.reason}")
    counts = Counter(f.status for _, _, f in findings)
    print(dict(counts), f"{time.perf_counter() - begun:.0f} s")
    if failed := [v.name for v in verdicts if not v.is_good]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
