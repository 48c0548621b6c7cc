"""The command ``gfsa bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bench(
    suite: Annotated[
        str,
        typer.Option(
            help="ops, attention, lengths, models, pretrain-step, linear, decode, decode-static "
            "or prefill."
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
    profile: Annotated[
        bool, typer.Option("--profile", help="Then GPU time by kernel and by kind, on CUDA.")
    ] = False,
    variants: Annotated[
        str, typer.Option(help="Only these variants, by name, separated by commas.")
    ] = "",
    append: Annotated[bool, typer.Option(help="Add the rows to the CSV file.")] = True,
    csv: Annotated[Path, typer.Option(help="The CSV file.")] = Path("results/bench.csv"),
) -> None:
    """Measure time and memory: plain attention, gfsa and the published form, side by side."""
    import torch
    from rich.console import Console

    from gfsa_benchmarks.run_suite import run_suite

    if compiled and blocks:
        raise typer.BadParameter("--compile compiles whole models, --compile-blocks their blocks")
    on = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    precision = dtype if dtype != "auto" else ("bfloat16" if on.startswith("cuda") else "float32")
    try:
        run_suite(
            suite,
            device=on,
            dtype=precision,
            shapes=[text for text in shapes.split(",") if text],
            rounds=rounds,
            graphs=graphs,
            compiled="blocks" if blocks else "model" if compiled else None,
            profile=profile,
            variants=[name.strip() for name in variants.split(",") if name.strip()],
            csv=csv if append else None,
            console=Console(),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
