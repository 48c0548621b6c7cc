"""Run the census: ``python -m census.run`` from the folder ``tests``.

Entries are dealt out to worker processes. A worker that dies or hangs costs one entry: it is
recorded as a failure, and another worker takes over.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from census import page
from census.known_failures import KNOWN
from census.verdict import GOOD, Finding, Verdict

TIME_LIMIT = 120
"""Seconds for one entry; the parent waits half a minute longer, then ends the worker."""
MEMORY_LIMIT = 8 << 30


def worker() -> None:
    """Read names from stdin, write a verdict for each to the original stdout."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    results = os.fdopen(os.dup(1), "w")
    # models and libraries print; only verdicts belong on stdout
    os.dup2(2, 1)
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
    for line in sys.stdin:
        name, begun = line.strip(), time.perf_counter()
        signal.alarm(TIME_LIMIT)
        try:
            verdict = examine(known[name])
        except TimeoutError:
            reason = f"did not finish in {TIME_LIMIT} s"
            verdict = Verdict(name, findings={"default": Finding("crash", reason)})
        finally:
            signal.alarm(0)
        verdict.seconds = round(time.perf_counter() - begun, 2)
        results.write(json.dumps(verdict.to_json()) + "\n")
        results.flush()
        # the collector need not look again at what was imported for this entry
        gc.collect()
        gc.freeze()


def _out_of_time(*_: object) -> None:
    raise TimeoutError


class Worker:
    """A process that examines entries one after another."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "census.run", "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # what can be imported here can be imported there, wherever this process was started
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def examine(self, name: str) -> Verdict:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=TIME_LIMIT + 30)
            reason = f"the process ended with {self.process.wait() if not line else 0}"
        except queue.Empty:
            line, reason = "", f"hangs: ended after {TIME_LIMIT + 30} s"
        except BrokenPipeError:
            line, reason = "", "the process could not be started"
        if line:
            return Verdict.from_json(json.loads(line))
        self.end()
        return Verdict(name, findings={"default": Finding("crash", reason)})

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def run(names: Iterable[str], processes: int, log: Path | None = None) -> list[Verdict]:
    """Verdicts for all names, in their order; those in the log already are not found again."""
    names = list(names)
    verdicts: dict[str, Verdict] = {}
    if log is not None and log.exists():
        for line in log.read_text(encoding="utf-8").splitlines():
            verdict = Verdict.from_json(json.loads(line))
            verdicts[verdict.name] = verdict
    todo: queue.Queue[str] = queue.Queue()
    for name in names:
        if name not in verdicts:
            todo.put(name)
    lock = threading.Lock()

    def serve() -> None:
        current = Worker()
        while True:
            try:
                name = todo.get_nowait()
            except queue.Empty:
                break
            if not current.is_alive:
                current = Worker()
            verdict = current.examine(name)
            with lock:
                verdicts[name] = verdict
                if log is not None:
                    with log.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(verdict.to_json()) + "\n")
        current.end()

    threads = [threading.Thread(target=serve) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [verdicts[name] for name in names]


def summary(verdicts: Iterable[Verdict]) -> Counter[str]:
    """How many findings have each status."""
    return Counter(f.status for v in verdicts for f in v.findings.values())


def failures(verdicts: Iterable[Verdict]) -> list[str]:
    """One line for each finding that is a failure."""
    return [
        f"{v.name} ({v.model}), {mode}: {f.status}: {f.reason}"
        for v in verdicts
        for mode, f in v.findings.items()
        if f.status not in GOOD
    ]


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("transformers", "timm")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="entries such as transformers:bert (default all)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--log", type=Path, help="verdicts as JSON lines: read if there are any, then appended to"
    )
    parser.add_argument("--write", action="store_true", help="write the table of docs/supported.md")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker()
        return
    from census.catalogue import entries

    begun = time.perf_counter()
    names = arguments.names or [entry.name for entry in entries()]
    verdicts = run(names, arguments.processes, arguments.log)
    if arguments.write:
        page.write(page.section(verdicts, _versions()))
    for line in failures(verdicts):
        print(line)
    print(dict(summary(verdicts)), f"{time.perf_counter() - begun:.0f} s")
    found = {v.name for v in verdicts if not v.is_good}
    if found - KNOWN:
        sys.exit(f"not in known_failures.py: {', '.join(sorted(found - KNOWN))}")
    if mended := KNOWN & set(names) - found:
        sys.exit(f"mended, to be taken out of known_failures.py: {', '.join(sorted(mended))}")


if __name__ == "__main__":
    main()
