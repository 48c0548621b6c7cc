"""``gfsa tune``: measure the fused kernels on the GPU at hand, for ``auto`` to choose by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from gfsa.kernels.tuned import Row


def tune(device: Annotated[str, typer.Option(help="cuda, cuda:1 …")] = "cuda") -> None:
    """Check and time the fused kernels on this GPU, once; `auto` chooses by the result.

    Example: gfsa tune --device cuda:1
    """
    import torch
    from rich.console import Console
    from rich.progress import track

    from gfsa.kernels import tuned

    if not torch.cuda.is_available():
        typer.echo("gfsa tune measures kernels on a GPU, and torch sees none here", err=True)
        raise typer.Exit(2)
    known = ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if device not in known:
        typer.echo(f"gfsa tune: --device is one of {', '.join(known)}, got {device!r}", err=True)
        raise typer.Exit(2)
    from gfsa.kernels.tune_gpu import GPU

    gpu, file, shapes = GPU(torch.device(device)), tuned.path(), tuned.SHAPES
    found: list[Row | str] = []
    interrupted = False
    typer.echo(f"measures {len(shapes)} kinds of calls, and writes what it finds to {file}")
    try:
        served = [shape for shape in shapes if gpu.refusal(shape) is None]
        # before anything is timed: compilers would take the host's time
        for _ in track(gpu.prepare(served), "compiling", len(served), transient=True):
            pass
        for shape in track(shapes, "measuring", transient=True):
            found.append(gpu.measure(shape))
    except KeyboardInterrupt:
        interrupted = True
    rows = [row for row in found if not isinstance(row, str)]
    if rows:
        Console().print(_table(rows))
    for reason in sorted({reason for reason in found if isinstance(reason, str)}):
        typer.echo(f"not served: {reason}")
    if not rows:
        why = "interrupted" if interrupted else "the fused kernels serve no call on this GPU"
        typer.echo(f"{why}: nothing was written", err=True)
        raise typer.Exit(130 if interrupted else 1)
    tuned.write(file, tuned.this_machine(gpu.device), rows, update=interrupted)
    if interrupted:
        typer.echo(f"interrupted: the {len(rows)} kinds that were measured are in {file}", err=True)
        raise typer.Exit(130)
    faster = sum(row.is_faster for row in rows)
    typer.echo(
        f"from now on auto uses the fused kernels for {faster} of {len(rows)} kinds of calls (*), "
        f"and torch's attention for all others; written to {file}"
    )


def _table(rows: Sequence[Row]) -> Table:
    """A line for each kind of call: the fused kernels' time relative to torch's, by length."""
    from rich.table import Table

    from gfsa.kernels.tuned import LENGTHS

    title = "fused / torch, forward and backward; * is used, ! is not exact enough to be used"
    table = Table(title=title, title_justify="left", box=None)
    for name in ("degree", "head dim", "kind", *map(str, LENGTHS)):
        table.add_column(name, justify="left" if name == "kind" else "right")
    ratios = {}
    for row in rows:
        mark = "*" if row.is_faster else " " if row.is_right else "!"
        ratios[row.shape] = f"{row.fused_ms / row.torch_ms:.2f}{mark}"
    for kind in dict.fromkeys(shape._replace(tokens=0) for shape in ratios):
        names = [name for name in ("causal", "masked") if getattr(kind, name)]
        cells = [ratios.get(kind._replace(tokens=tokens), "– ") for tokens in LENGTHS]
        table.add_row(str(kind.degree), str(kind.head_dim), " ".join(names), *cells)
    return table
