"""``gfsa bench``: measures the cases of a suite one by one, prints them and appends their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from gfsa_benchmarks.case import Case, Compiled, Setting, Shape
    from gfsa_benchmarks.measure import Row
    from gfsa_benchmarks.suites import Suite

_DTYPES = ("float64", "float32", "bfloat16", "float16")
# per function: each model of a case has a graph with gradients and one without
_GRAPHS = 64


def bench(
    suite: Annotated[
        str,
        typer.Option(
            help="ops, attention, models, pretrain-step, linear, decode, decode-static or prefill."
        ),
    ] = "ops",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1 …; auto uses a GPU if there is one.")
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16; auto is bfloat16 on CUDA.")
    ] = "auto",
    shapes: Annotated[
        str,
        typer.Option(
            help="BATCHxHEADSxTOKENSxDIM[:causal][:padded][:dropout=0.2], separated by commas; "
            "HEADS may be 32/8."
        ),
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 15,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Time CUDA graphs: for launch-bound shapes.")
    ] = False,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile", help="Suites models, pretrain-step, decode-static: compile each model."
        ),
    ] = False,
    blocks: Annotated[
        bool, typer.Option("--compile-blocks", help="Likewise, its blocks one by one.")
    ] = False,
    variants: Annotated[
        str, typer.Option(help="Only these variants, by name, separated by commas.")
    ] = "",
    append: Annotated[bool, typer.Option(help="Add the rows to the CSV file.")] = True,
    csv: Annotated[Path, typer.Option(help="The CSV file.")] = Path("results/bench.csv"),
) -> None:
    """Measure time and memory: plain attention, gfsa and the published form, side by side.

    Example: gfsa bench --suite attention --graphs --shapes 8x12x1024x64:causal
    """
    import torch
    from rich.console import Console

    from gfsa_benchmarks.case import Setting

    on = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    precision = dtype if dtype != "auto" else ("bfloat16" if on.startswith("cuda") else "float32")
    try:
        if compiled and blocks:
            raise ValueError("--compile compiles whole models, --compile-blocks their blocks")
        part: Compiled | None = "blocks" if blocks else "model" if compiled else None
        run_suite(
            suite,
            Setting(_device(on), _dtype(precision), part, graphs),
            shapes=[text for text in shapes.split(",") if text],
            rounds=rounds,
            variants=[name.strip() for name in variants.split(",") if name.strip()],
            csv=csv if append else None,
            console=Console(),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def run_suite(
    name: str,
    setting: Setting,
    shapes: Sequence[str],
    rounds: int,
    variants: Sequence[str],
    csv: Path | None,
    console: Console,
) -> list[list[Row]]:
    """Measure the suite called ``name``; returns a list of rows for each shape.

    Args:
        shapes: as text, see :class:`~gfsa_benchmarks.case.Shape`; empty for the suite's own.
        variants: names of those to measure besides the first of a case; empty for all.
        csv: rows are appended to this file after each case; ``None`` for no file.
    """
    import torch
    from rich.progress import Progress

    from gfsa_benchmarks.decode import memory_of_caches
    from gfsa_benchmarks.measure import COLUMNS, append, measure
    from gfsa_benchmarks.suites import SUITES
    from gfsa_experiments.runs.row import check_table

    if name not in SUITES:
        raise ValueError(f"expected a suite of {', '.join(SUITES)}, got {name!r}")
    suite = SUITES[name]
    if setting.compiled and not suite.compiles:
        raise ValueError(
            f"the suite {name} has nothing to compile; --compile is for models, pretrain-step and "
            "decode-static"
        )
    if csv is not None:
        # a wrong file is refused before minutes of measuring
        check_table(csv, COLUMNS)
    if setting.device.type == "cuda":
        # graphs and events are created on the current device
        torch.cuda.set_device(setting.device.index or 0)
    wanted = _shapes(suite, shapes or suite.shapes(setting.device))
    cases = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=2 * rounds * len(wanted))
        for shape in wanted:
            progress.update(task, description=f"{name} {shape}")
            torch.manual_seed(0)
            with compiling() if setting.compiled else nullcontext():
                case = _only(suite.build(shape, setting), variants)
                rows = measure(case, name, setting, rounds, partial(progress.advance, task))
            cases.append(rows)
            console.print(table(rows))
            if csv is not None:
                append(rows, csv)
            if name == "prefill":
                console.print(memory_of_caches(case))
    if name == "attention":
        console.print(ratios(cases))
    if csv is not None:
        console.print(f"{sum(map(len, cases))} rows added to {csv}")
    return cases


def _only(case: Case, names: Sequence[str]) -> Case:
    """Some variants of a case, by name, and always the first, the reference."""
    known = [variant.name for variant in case.variants]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"expected variants of {', '.join(known)}, got {', '.join(unknown)}")
    first, *others = case.variants
    kept = [first, *(v for v in others if not names or v.name in names)]
    return replace(case, variants=kept)


def _shapes(suite: Suite, texts: Sequence[str]) -> list[Shape]:
    """The shapes to measure; raises for one that the suite cannot take."""
    from gfsa_benchmarks.case import Shape

    shapes = [Shape.parse(text) for text in texts]
    grouped = [str(shape) for shape in shapes if shape.key_heads is not None]
    if grouped and not suite.grouped:
        raise ValueError(
            "only the suites ops, attention, decode, decode-static and prefill take grouped heads; "
            f"give one number of heads instead of {grouped[0]}"
        )
    dropped = [str(shape) for shape in shapes if shape.dropout]
    if dropped and not suite.drops:
        raise ValueError(f"only the suite ops takes dropout, got the shape {dropped[0]}")
    return shapes


@contextmanager
def compiling() -> Iterator[None]:
    """Compile a case independently of earlier ones, and fail where the compiler would give up.

    Models of one library share functions, and the compiler keeps a limited number of graphs per
    function: beyond that it would run the next model in eager mode with only a line in the log.
    """
    from torch import _dynamo as dynamo

    dynamo.reset()
    with dynamo.config.patch(recompile_limit=_GRAPHS, fail_on_recompile_limit_hit=True):
        yield


def _device(name: str) -> torch.device:
    import torch

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
    import torch

    if name not in _DTYPES:
        raise ValueError(f"expected a dtype of {', '.join(_DTYPES)}, got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def table(rows: Sequence[Row]) -> Table:
    """One case: times, their ratio to the first variant, and memory."""
    from rich.table import Table

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
    from rich.table import Table

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


def _ms(value: float | None) -> str:
    """Three significant digits, without an exponent."""
    if value is None or value >= 100:
        return _number(value, ".0f")
    return format(value, ".3g")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
