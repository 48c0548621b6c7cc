"""``gfsa demo``: the digits experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = 4,
    epochs: Annotated[int, typer.Option(min=1)] = 8,
    depth: Annotated[int, typer.Option(min=1, help="Attention layers.")] = 12,
    K: Annotated[int, typer.Option("--K", min=2, help="Order of GFSA's high-order term.")] = 3,
    out: Annotated[Path, typer.Option(help="Where figures and numbers go.")] = Path("gfsa-demo"),
    on: Annotated[
        str, typer.Option(help="test, or validation: the set to choose settings on.")
    ] = "test",
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds, to see that it runs; shows nothing.")
    ] = False,
) -> None:
    """Train a deep ViT on digits with and without graph filters, and say what came of it."""
    if on not in ("test", "validation"):
        raise typer.BadParameter(f"--on is test or validation, got {on!r}")
    try:
        import matplotlib  # noqa: F401
        import sklearn  # noqa: F401
    except ModuleNotFoundError as error:
        typer.echo(f"gfsa demo needs {error.name}: pip install gfsa-experiments", err=True)
        raise typer.Exit(1) from error
    from rich.console import Console

    from gfsa_experiments.demo.run_demo import DemoSettings, run_demo

    settings = DemoSettings(
        seeds=min(seeds, 2) if quick else seeds,
        epochs=1 if quick else epochs,
        depth=min(depth, 3) if quick else depth,
        K=K,
        held_out=on,  # type: ignore[arg-type]
    )
    run_demo(settings, out, Console())
