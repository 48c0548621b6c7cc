"""Runs a suite: measures its cases one by one, prints them and appends their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gfsa_benchmarks import profiling
from gfsa_benchmarks.case import Case, Compiled, Setting, Shape, only
from gfsa_benchmarks.decode import memory_of_caches
from gfsa_benchmarks.harness import COLUMNS, Row, append, measure
from gfsa_benchmarks.suites import Suite, suite_called
from gfsa_experiments.runs.csv_table import check_table

DTYPES = ("float64", "float32", "bfloat16", "float16")
# per function: each model of a case has a graph with gradients and one without
_GRAPHS = 64
_PROFILE_WIDTH = 150


def run_suite(
    name: str,
    device: str,
    dtype: str,
    shapes: Sequence[str],
    rounds: int,
    graphs: bool,
    compiled: Compiled | None,
    variants: Sequence[str],
    csv: Path | None,
    console: Console,
    profile: bool = False,
) -> list[list[Row]]:
    """Measure the suite called ``name``; returns a list of rows for each shape.

    Args:
        shapes: as text, see :class:`~gfsa_benchmarks.case.Shape`; empty for the suite's own.
        compiled: which part of a model to compile, for suites that have models.
        variants: names of those to measure besides the first of a case; empty for all.
        csv: rows are appended to this file after each case; ``None`` for no file.
        profile: whether to print where the GPU time of each variant's step goes as well.
    """
    suite = suite_called(name)
    if compiled and not suite.compiles:
        raise ValueError(
            f"the suite {name} has nothing to compile; --compile is for models, pretrain-step and "
            "decode-static"
        )
    if csv is not None:
        # a wrong file is refused before minutes of measuring
        check_table(csv, COLUMNS)
    setting = Setting(_device(device), _dtype(dtype), compiled, graphs)
    if profile:
        _refuse_profile(setting)
    if setting.device.type == "cuda":
        # graphs and events are created on the current device
        torch.cuda.set_device(setting.device.index or 0)
    wanted = _shapes(suite, shapes or suite.shapes(setting.device))
    cases = []
    with _progress(console) as progress:
        task = progress.add_task("measuring", total=2 * rounds * len(wanted))
        for shape in wanted:
            progress.update(task, description=f"{name} {shape}")
            torch.manual_seed(0)
            with compiling() if compiled else nullcontext():
                case = only(suite.build(shape, setting), variants)
                advance = partial(progress.advance, task)
                rows = measure(case, name, setting, rounds, advance)
                cases.append(rows)
                console.print(table(rows))
                if csv is not None:
                    append(rows, csv)
                if name == "prefill":
                    console.print(memory_of_caches(case))
                if profile:
                    _print_profiles(case, setting, console)
    if name == "attention":
        console.print(ratios(cases))
    for rows in cases:
        if sentence := against_published(rows):
            console.print(sentence)
    if csv is not None:
        console.print(f"{sum(map(len, cases))} rows added to {csv}")
    return cases


def _refuse_profile(setting: Setting) -> None:
    if setting.device.type != "cuda" or setting.graphs:
        raise ValueError(
            f"--profile reads the kernels of steps that are launched on CUDA, got the device "
            f"{setting.device}{' and --graphs' if setting.graphs else ''}"
        )


def _shapes(suite: Suite, texts: Sequence[str]) -> list[Shape]:
    """The shapes to measure; raises for one that the suite cannot take."""
    shapes = [Shape.parse(text) for text in texts]
    grouped = [str(shape) for shape in shapes if shape.key_heads is not None]
    if grouped and not suite.grouped:
        raise ValueError(
            "only the suites ops, attention and lengths take grouped heads; give one number of "
            f"heads instead of {grouped[0]}"
        )
    dropped = [str(shape) for shape in shapes if shape.dropout]
    if dropped and not suite.drops:
        raise ValueError(f"only the suite ops takes dropout, got the shape {dropped[0]}")
    return shapes


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _print_profiles(case: Case, setting: Setting, console: Console) -> None:
    profiles = {
        variant.name: profiling.profile_step(variant.step or variant.forward, setting.device)
        for variant in case.variants
    }
    # names of kernels are long: a narrow terminal breaks the lines, and no number is cut
    wide = Console(file=console.file, width=_PROFILE_WIDTH)
    wide.print(profiling.kinds_table(profiles))
    wide.print(profiling.kernels_table(profiles))


@contextmanager
def compiling() -> Iterator[None]:
    """Compile a case independently of earlier ones, and fail where the compiler would give up.

    Models of one library share functions, and the compiler keeps a limited number of graphs per
    function: beyond that it would run the next model in eager mode with only a line in the log.
    """
    dynamo = torch._dynamo
    dynamo.reset()
    with dynamo.config.patch(recompile_limit=_GRAPHS, fail_on_recompile_limit_hit=True):
        yield


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"expected a device such as cpu or cuda, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the benchmarks can time cpu and cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device here; see `gfsa info`, or use --device cpu")
    return device


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"expected a dtype of {', '.join(DTYPES)}, got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def table(rows: Sequence[Row]) -> Table:
    """One case: times, their ratio to the first variant, and memory."""
    first = rows[0]
    shown = Table(
        title=f"{first.suite} {first.shape} {first.dtype}, {first.device}",
        caption=(
            f"batch×heads×tokens×dim; medians of {first.rounds} interleaved rounds, "
            f"{first.timing}; × is to {first.variant}"
        ),
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("variant", no_wrap=True)
    shown.add_column("by", no_wrap=True)
    for heading in ("fwd\nms", "×", "fwd+bwd\nms", "×", "peak\nMiB", "extra\nMiB"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row.variant,
            row.backend,
            _ms(row.fwd_ms),
            _number(row.fwd_ratio, ".3f"),
            _ms(row.fwd_bwd_ms),
            _number(row.fwd_bwd_ratio, ".3f"),
            f"{row.peak_mib:.1f}",
            f"{row.extra_mib:+.1f}",
        )
    return shown


def ratios(cases: Sequence[Sequence[Row]]) -> Table:
    """A row for each shape: each variant's time in those of the first, fwd+bwd | fwd."""
    shown = Table(title="fwd+bwd | fwd, in times of plain attention", title_justify="left")
    shown.add_column("shape", no_wrap=True)
    for row in cases[0][1:]:
        shown.add_column(row.variant, justify="right", no_wrap=True)
    for first, *rows in cases:
        times = [
            f"{_number(row.fwd_bwd_ratio, '.2f')} | {_number(row.fwd_ratio, '.2f')} {row.backend}"
            for row in rows
        ]
        shown.add_row(first.shape, *times)
    return shown


def against_published(rows: Sequence[Row]) -> str | None:
    """What gfsa saves against the published form, in a sentence; None if it was not measured."""
    named = {row.variant: row for row in rows}
    ours, theirs = named.get("gfsa"), named.get("published")
    if ours is None or theirs is None or not ours.fwd_bwd_ms or not theirs.fwd_bwd_ms:
        return None
    memory = ours.extra_mib / theirs.extra_mib
    return (
        f"{ours.shape}: forward+backward {theirs.fwd_bwd_ms / ours.fwd_bwd_ms:.1f}× faster than "
        f"the published form, with {memory:.1%} of its extra memory"
    )


def _ms(value: float | None) -> str:
    """Three significant digits, without an exponent."""
    if value is None or value >= 100:
        return _number(value, ".0f")
    return format(value, ".3g")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
