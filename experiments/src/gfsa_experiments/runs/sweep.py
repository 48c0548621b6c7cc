"""A sweep: every combination of methods, orders, seeds and settings, checked, and carried out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import os
import shlex
import signal
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from gfsa_experiments.engine.config import TrainConfig, field_names, from_text
from gfsa_experiments.engine.measure import Progress
from gfsa_experiments.runs.methods import METHODS, MethodConfig, check_options, find_method
from gfsa_experiments.runs.row import Row, append_rows, read_rows
from gfsa_experiments.runs.run import DivergedError, Run, carry_out
from gfsa_experiments.tasks import find_recipe

# a range with more numbers is a typing error
_MOST_NUMBERS = 10_000


@dataclass(frozen=True)
class Request:
    """The arguments of one ``gfsa train`` as they are typed: what to run, and its settings."""

    recipe: str
    method: str = "plain"
    K: str = ""
    seeds: str = "0"
    setting: Sequence[str] | None = None
    each: Sequence[str] | None = None
    """Settings with several values, separated by commas; every combination of them is run."""

    @property
    def line(self) -> str:
        """The line of a plan for a request without ``K`` and ``each``."""
        flags = "".join(f" --set {shlex.quote(text)}" for text in self.setting or ())
        return f"{self.recipe} --method {self.method} --seeds {self.seeds}{flags}"

    def runs(self, **places: Any) -> list[Run]:
        """Every combination, checked; a method without an option is run once, not per value.

        ``places`` are further fields of :class:`Run`. Settings that make no sense, or have no
        effect in any combination, raise ValueError.
        """
        methods = [name.strip() for name in self.method.split(",") if name.strip()]
        if not methods:
            raise ValueError(f"--method takes some of {', '.join(METHODS)}, got {self.method!r}")
        found = [self._runs(methods, settings, places) for settings in self._combinations()]
        # a setting without effect in one combination may be meant for another
        (_, first), *others = found
        unused = {k: why for k, why in first.items() if all(k in other for _, other in others)}
        if unused:
            reasons = "; ".join(f"{name} ({why})" for name, why in unused.items())
            raise ValueError(f"leave out settings that would have no effect: {reasons}")
        return one_per_folder([run for runs, _ in found for run in runs])

    def _runs(
        self, methods: Sequence[str], settings: dict[str, str], places: dict[str, Any]
    ) -> tuple[list[Run], dict[str, str]]:
        """The runs of one combination of settings, and why some settings have no effect."""
        recipe = find_recipe(self.recipe)
        for_recipe, for_method = _split_settings(settings, recipe.config)
        config, unused = _config(recipe.config, for_recipe)
        runs: list[Run] = []
        used: set[str] = set()
        for name in methods:
            method = find_method(name)
            # another method of the same request may read the others
            given = {key: text for key, text in for_method.items() if key in method.uses}
            having_effect = method.used_options(from_text(MethodConfig, given))
            used.update(having_effect)
            kept = {key: text for key, text in given.items() if key in having_effect}
            options = from_text(MethodConfig, kept)
            for seed in numbers_of("--seeds", self.seeds):
                seeded = dataclasses.replace(config, seed=seed)
                run = Run(recipe=self.recipe, config=seeded, method=name, options=options, **places)
                run.check()
                runs.append(run)
            check_options(name, options, config.sketch(), config.label())
        with_learn = f" with learn={for_method['learn']}" if "learn" in for_method else ""
        why = (
            f"none of the methods {', '.join(methods)} has such an option{with_learn}; their "
            f"options: {', '.join(sorted(used)) or 'none'}"
        )
        return runs, unused | {k: why for k in for_method if k not in used}

    def _combinations(self) -> list[dict[str, str]]:
        """The settings with each combination of the values in ``each``."""
        settings = [_setting_of("--set", text) for text in self.setting or ()]
        several = [_setting_of("--each", text) for text in self.each or ()]
        if self.K:
            several.append(("K", ",".join(map(str, numbers_of("--K", self.K)))))
        names = [name for name, _ in several]
        given = [*names, *(name for name, _ in settings)]
        twice = sorted({name for name in given if given.count(name) > 1})
        if twice:
            raise ValueError(
                f"{', '.join(twice)} given twice, by --set, --each or --K: give one value "
                "to --set, or all values to one --each, separated by commas"
            )
        combinations = itertools.product(*(text.split(",") for _, text in several))
        return [
            dict(settings) | dict(zip(names, map(str.strip, values), strict=True))
            for values in combinations
        ]


def _split_settings(settings: dict[str, str], config: Any) -> tuple[dict[str, str], dict[str, str]]:
    """The settings of the recipe, and the options of the methods."""
    of_recipe, of_method = field_names(config), field_names(MethodConfig)
    full = dict(config.short_names)
    for short, name in full.items():
        if short in settings and name in settings:
            raise ValueError(f"{short} and {name} are one setting; leave one of them out")
    settings = {full.get(name, name): text for name, text in settings.items()}
    if "seed" in settings:
        raise ValueError("seeds are given by --seeds, not by --set seed=…")
    for_method = {k: v for k, v in settings.items() if k in of_method and k not in of_recipe}
    return {k: v for k, v in settings.items() if k not in for_method}, for_method


def one_per_folder(runs: Sequence[Run]) -> list[Run]:
    """The runs, each once; ValueError for different runs that rows could not tell apart."""
    folders: dict[Path, Run] = {}
    for run in runs:
        other = folders.setdefault(run.folder, run)
        if other.config == run.config:
            continue
        pairs = zip(vars(other.config).items(), vars(run.config).values(), strict=True)
        differing = "; ".join(f"{name}={a} and {name}={b}" for (name, a), b in pairs if a != b)
        raise ValueError(
            f"two runs would have the folder {run.folder}: {differing}. Give one value, or several "
            "commands with an --out each; of a path outside of the working folder only the last "
            "part counts, so rename one of them"
        )
    return list(folders.values())


def _config(kind: type[TrainConfig], given: dict[str, str]) -> tuple[TrainConfig, dict[str, str]]:
    """A recipe's config with the given settings, and those without effect, with the reason."""
    settings = dict(given)
    if "epochs" in given:
        # epochs override the max_steps that some recipes have by default
        settings.setdefault("max_steps", "0")
    config = from_text(kind, settings)
    if "epochs" in given and config.max_steps:
        raise ValueError(
            f"epochs={given['epochs']} and max_steps={config.max_steps} both say when to stop; "
            "leave one of them out"
        )
    unused = {name: why for name, why in config.unused().items() if name in given}
    # with them the row would look like that of another experiment
    return from_text(kind, {k: v for k, v in settings.items() if k not in unused}), unused


def numbers_of(flag: str, text: str) -> tuple[int, ...]:
    """The numbers in ``0-4``, ``0,1,2`` or a mixture, each once."""
    ranges = []
    try:
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            ranges.append(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        ranges = []
    # an empty range such as 4-2 is a typing error
    if not ranges or not all(map(len, ranges)):
        raise ValueError(f"{flag} takes numbers such as 0,1,2 or 0-4, got {text!r}")
    if sum(map(len, ranges)) > _MOST_NUMBERS:
        raise ValueError(f"{flag} takes at most {_MOST_NUMBERS} numbers, got {text!r}")
    return tuple(dict.fromkeys(itertools.chain.from_iterable(ranges)))


def _setting_of(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{flag} takes key=value, got {text!r}")
    return name.strip(), value.strip()


class Finished(NamedTuple):
    """A run that has ended: with a row, with an error, or (if it diverged) with both."""

    run: Run
    row: Row | None
    error: str = ""


def carry_out_all(
    runs: Sequence[Run], jobs: int = 1, progress: Callable[[Run], Progress] | None = None
) -> Iterator[Finished]:
    """Yield each run as it ends, ``jobs`` at a time; the others continue if one fails.

    ``progress`` makes the progress callback of a run, which it has if it runs alone.
    """
    if jobs == 1:
        for run in runs:
            yield attempt(run, progress(run) if progress else None)
        return
    cores = max(1, (os.cpu_count() or 1) // jobs)
    # a forked process cannot use the parent's CUDA context and threads
    spawn = multiprocessing.get_context("spawn")
    # a pool of one process per thread: the end of a process breaks its pool alone
    threads, own, pools = ThreadPoolExecutor(jobs), threading.local(), []

    def beside_others(run: Run) -> Finished:
        if not hasattr(own, "pool"):
            own.pool = ProcessPoolExecutor(1, spawn, initializer=_begin_worker, initargs=(cores,))
            pools.append(own.pool)
        try:
            return own.pool.submit(attempt, run).result()
        except BrokenProcessPool:
            del own.pool
            return Finished(run, None, "its process was killed (out of memory?); see --resume")

    try:
        for future in as_completed([threads.submit(beside_others, run) for run in runs]):
            yield future.result()
    finally:
        # an interrupt ends the queued and the active runs too
        threads.shutdown(wait=False, cancel_futures=True)
        for pool in pools:
            for worker in list((pool._processes or {}).values()):
                worker.terminate()


def _begin_worker(threads: int) -> None:
    # the parent handles interrupts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def attempt(run: Run, progress: Progress | None = None) -> Finished:
    """Carry out a run; an error is part of what is returned, not raised."""
    try:
        return Finished(run, carry_out(run, progress))
    except Exception as error:
        diverged = isinstance(error, DivergedError)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not diverged:
            # the launcher has to end the other processes, which wait for this one; where a run
            # diverges, all of them see it
            raise
        details = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):
            if run.folder.exists():
                (run.folder / "error.txt").write_text(details, encoding="utf-8")
        row = error.row if isinstance(error, DivergedError) else None
        # the message of these says enough
        is_expected = isinstance(error, (ValueError, OSError, FloatingPointError))
        return Finished(run, row, f"{error}" if is_expected else details)


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """One line, as it is and at once, however wide the output is taken to be."""
    console.print(text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)
    console.file.flush()


# below this mean |coefficient − start|, a learned filter is ordinary attention in effect
_HARDLY_MOVED = 1e-3


def record_all(console: Console, runs: list[Run], jobs: int, results: Path, write: bool) -> int:
    """Run everything, append each row as it comes, and return the number of failed runs."""
    before = {run.folder for run in runs if run.resume and (run.folder / "row.json").exists()}
    # error → the runs that failed with it: wrong data makes every run fail alike
    failures: dict[str, list[str]] = defaultdict(list)
    at_rest: set[str] = set()
    # a line is redrawn on a terminal alone
    with console.status(f"0 of {len(runs)} runs") as status:
        progress = functools.partial(_follow, console, status)
        ended = enumerate(carry_out_all(runs, jobs, progress), start=1)
        for count, (run, row, error) in ended:
            # a sweep of settings has many runs of one method
            name = f"{run} {run.key().settings}".strip()
            if row is not None and write:
                error = "; ".join(filter(None, [error, _append(results, run, row, before)]))
            if row is None or error:
                failures[error].append(name)
                if len(failures[error]) == 1:
                    print_line(console, f"failed: {name}: {error}", style="red")
            else:
                said = "finished before: " if run.folder in before else ""
                print_line(console, f"{said}{name}: {row.metric} {row.test:.4f}")
                if row.added and row.moved is not None and row.moved < _HARDLY_MOVED:
                    at_rest.add(f"{row.method} {row.options}".strip())
            status.update(f"{count} of {len(runs)} runs")
    for first, *others in failures.values():
        if others:
            more = "1 more run" if len(others) == 1 else f"{len(others)} more runs"
            print_line(console, f"failed: {more} for the reason of {first}", style="red")
    for name in sorted(at_rest):
        message = (
            f"{name}: the coefficients moved by less than {_HARDLY_MOVED} in the mean, so the "
            "model is plain in effect: no gradient reaches them, or their learning rate is too "
            "low; --set filter_lr=1e-2 would give them one of their own"
        )
        print_line(console, message, style="yellow")
    failed = sum(map(len, failures.values()))
    shown = "; gfsa results shows the tables" if failed < len(runs) else ""
    console.print(f"{len(runs) - failed} of {len(runs)} runs done{shown}")
    return failed


def _follow(console: Console, status: Status, run: Run) -> Progress:
    """The progress callback of a run: where it is; off a terminal a line at each evaluation."""

    def update(text: str, evaluated: bool) -> None:
        status.update(escape(f"{run}: {text}"))
        if evaluated and not console.is_terminal:
            print_line(console, f"{run}: {text}")

    return update


def _append(results: Path, run: Run, row: Row, before: set[Path]) -> str:
    """Append a run's row to its table; returns why it could not be, if so."""
    table = results / f"{row.recipe}.csv"
    try:
        # of several rows of a run the latest counts; a run that was finished before usually has
        # its row in the table
        recorded = {(other.key, other.data) for other in read_rows(table)}
        if run.folder not in before or (row.key, row.data) not in recorded:
            append_rows(table, [row])
    except (ValueError, OSError) as reason:
        # the other runs continue
        return f"its row is in {run.folder / 'row.json'}, --resume adds it: {reason}"
    return ""
