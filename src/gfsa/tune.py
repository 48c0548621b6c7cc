"""``gfsa tune``: measure the fused kernels on the GPU at hand, for ``auto`` to choose by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gfsa.kernels.tuned import Row, Shape


def tune(device: Annotated[str, typer.Option(help="cuda, cuda:1 …")] = "cuda") -> None:
    """Check and time the fused kernels on this GPU, once; `auto` chooses by the result.

    Example: gfsa tune --device cuda:1
    """
    import torch

    from gfsa.kernels import tuned

    if not torch.cuda.is_available():
        typer.echo("gfsa tune measures kernels on a GPU, and torch sees none here", err=True)
        raise typer.Exit(2)
    known = ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if device not in known:
        typer.echo(f"gfsa tune: --device is one of {', '.join(known)}, got {device!r}", err=True)
        raise typer.Exit(2)
    from gfsa.kernels import tune_gpu

    gpu, shapes = tune_gpu.GPU(torch.device(device)), tuned.SHAPES
    found: list[Row | str] = []

    def count(done: int, of: int, what: str = "compiled") -> None:
        if done % 16 == 0 or done == of:
            typer.echo(f"{what} {done} of {of}")

    def keep(shape: Shape, row: Row | str) -> None:
        found.append(row)
        count(len(found), len(shapes), "measured")

    file, interrupted = tuned.path(), False
    typer.echo(f"measures {len(shapes)} kinds of calls, and writes what it finds to {file}")
    try:
        tune_gpu.measure(gpu, shapes, keep, count)
    except KeyboardInterrupt:
        interrupted = True
    rows = [row for row in found if not isinstance(row, str)]
    reasons = {reason for reason in found if isinstance(reason, str)}
    for line in (*_table(rows), *(f"not served: {reason}" for reason in sorted(reasons))):
        typer.echo(line)
    if not rows:
        why = "interrupted" if interrupted else "the fused kernels serve no call on this GPU"
        typer.echo(f"{why}: nothing was written", err=True)
        raise typer.Exit(130 if interrupted else 1)
    tuned.write(file, gpu.machine, rows, update=interrupted)
    if interrupted:
        typer.echo(f"interrupted: the {len(rows)} kinds that were measured are in {file}", err=True)
        raise typer.Exit(130)
    faster = sum(row.is_faster for row in rows)
    typer.echo(
        f"from now on auto uses the fused kernels for {faster} of {len(rows)} kinds of calls (*), "
        f"and torch's attention for all others; written to {file}"
    )


def _table(rows: Sequence[Row]) -> list[str]:
    """A line for each kind of call: the fused kernels' time relative to torch's, by length."""
    from gfsa.kernels.tuned import LENGTHS

    found = {row.shape: row for row in rows}
    lines = ["fused / torch, forward and backward; * is used, ! is not exact enough to be used"]
    lines.append("degree  head dim  kind           " + "".join(f"{n:>8d} " for n in LENGTHS))
    for kind in dict.fromkeys(shape._replace(tokens=0) for shape in found):
        names = [name for name in ("causal", "masked") if getattr(kind, name)]
        cells = (_cell(found.get(kind._replace(tokens=tokens))) for tokens in LENGTHS)
        line = f"{kind.degree:6d}  {kind.head_dim:8d}  {' '.join(names):15s}{''.join(cells)}"
        lines.append(line.rstrip())
    return lines if rows else []


def _cell(row: Row | None) -> str:
    if row is None:
        return f"{'–':>8s} "
    mark = "*" if row.is_faster else " " if row.is_right else "!"
    return f"{row.fused_ms / row.torch_ms:8.2f}{mark}"
