"""``gfsa demo``: plain against filtered attention, trained in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    task: Annotated[
        str,
        typer.Option(
            help="stdlib: a decoder over the bytes of Python's own library; digits: a deep ViT."
        ),
    ] = "stdlib",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = 4,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps of stdlib; 500 by default.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over digits; 8 by default.")
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(min=1, help="Attention layers; by default 4 of stdlib, 12 of digits."),
    ] = None,
    K: Annotated[int, typer.Option("--K", min=2, help="Order of GFSA's high-order term.")] = 3,
    out: Annotated[Path, typer.Option(help="Where figures and numbers go.")] = Path("gfsa-demo"),
    on: Annotated[
        str, typer.Option(help="test, or validation: the part to choose settings on.")
    ] = "test",
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds, to see that it runs; shows nothing.")
    ] = False,
) -> None:
    """Train a small model with and without graph filters, and say what came of it."""
    if task not in ("stdlib", "digits"):
        raise typer.BadParameter(f"--task is stdlib or digits, got {task!r}")
    if on not in ("test", "validation"):
        raise typer.BadParameter(f"--on is test or validation, got {on!r}")
    if epochs is not None and task == "stdlib":
        raise typer.BadParameter("--epochs is for --task digits; stdlib takes --steps")
    if steps is not None and task == "digits":
        raise typer.BadParameter("--steps is for --task stdlib; digits takes --epochs")
    try:
        import matplotlib  # noqa: F401
        import sklearn  # noqa: F401
    except ModuleNotFoundError as error:
        typer.echo(
            f"gfsa demo needs {error.name}. In a checkout of gfsa: pip install ./experiments",
            err=True,
        )
        raise typer.Exit(1) from error
    from rich.console import Console

    from gfsa_experiments.demo.comparison import DemoSettings
    from gfsa_experiments.demo.run_demo import run_demo
    from gfsa_experiments.engine.whole_files import refuse_inside_file

    try:
        refuse_inside_file(out / "lens.html")
    except ValueError as error:
        raise typer.BadParameter(f"--out {out}: {error}") from error

    settings = DemoSettings(
        task=task,  # type: ignore[arg-type]
        seeds=min(seeds, 2) if quick else seeds,
        steps=20 if quick else steps or 500,
        epochs=1 if quick else epochs or 8,
        depth=min(depth or 2, 3) if quick else depth,
        K=K,
        held_out=on,  # type: ignore[arg-type]
        quick=quick,
        **({"jobs": 1} if quick else {}),
    )
    run_demo(settings, out, Console())
