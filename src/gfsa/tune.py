"""``gfsa tune``: measure the fused kernels on the GPU at hand, for ``auto`` to choose by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

if TYPE_CHECKING:
    from gfsa.operators.fused.tuned import Machine, Row, Shape


class Subject(Protocol):
    """What is measured: a GPU, or a stand-in for one."""

    @property
    def machine(self) -> Machine: ...

    def refusal(self, shape: Shape) -> str | None:
        """Why the fused kernels cannot serve such a call there, or None."""

    def errors(self, shape: Shape) -> tuple[float, float]:
        """Errors of the fused kernels and of torch's against the dense operator in float64."""

    def times(self, shape: Shape) -> tuple[float, float]:
        """Milliseconds, forward and backward, by the fused kernels and by torch's."""


def all_shapes() -> Iterator[Shape]:
    """The kinds of calls that are measured."""
    from gfsa.operators.fused.tuned import HEAD_DIMS, LENGTHS, Shape

    for degree in (1, 2):
        for head_dim in HEAD_DIMS:
            for tokens in LENGTHS:
                for causal in (False, True):
                    for masked in (False, True):
                        yield Shape(degree, head_dim, tokens, causal, masked)


def measure(
    subject: Subject,
    shapes: Sequence[Shape],
    on_row: Callable[[Shape, Row | str], None] = lambda shape, row: None,
) -> list[Row]:
    """A row for each shape that the fused kernels serve; exactness first, then times.

    Args:
        on_row: called with each shape and its row, or the reason why there is none.
    """
    from gfsa.operators.fused.tuned import Row

    rows = []
    for shape in shapes:
        refusal = subject.refusal(shape)
        if refusal is not None:
            on_row(shape, refusal)
            continue
        row = Row(shape, *subject.times(shape), *subject.errors(shape))
        rows.append(row)
        on_row(shape, row)
    return rows


def tune(
    device: Annotated[str, typer.Option(help="cuda, cuda:1 …")] = "cuda",
) -> None:
    """Check and time the fused kernels on this GPU, once; `auto` chooses by the result."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from gfsa.operators.fused import tuned

    console = Console(highlight=False)
    if not torch.cuda.is_available():
        typer.echo("gfsa tune measures kernels on a GPU, and torch sees none here", err=True)
        raise typer.Exit(2)
    from gfsa.operators.fused.tune_gpu import GPU

    subject = GPU(torch.device(device))
    table = Table("degree", "head dim", "tokens", "kind", "fused ms", "torch ms", "chosen")
    reasons: set[str] = set()

    def show(shape: Shape, row: Row | str) -> None:
        if isinstance(row, str):
            reasons.add(row)
            return
        kind = f"{'causal ' if shape.causal else ''}{'padded' if shape.masked else ''}".strip()
        chosen = "fused" if row.is_faster else "torch" if row.is_right else "torch (not exact)"
        times = (f"{row.fused_ms:.3f}", f"{row.torch_ms:.3f}")
        table.add_row(
            str(shape.degree), str(shape.head_dim), str(shape.tokens), kind, *times, chosen
        )

    rows = measure(subject, list(all_shapes()), show)
    for reason in sorted(reasons):
        console.print(f"not served: {reason}")
    if not rows:
        typer.echo("the fused kernels serve no call on this GPU: nothing was written", err=True)
        raise typer.Exit(1)
    console.print(table)
    file = tuned.path()
    tuned.write(file, subject.machine, rows)
    faster = sum(row.is_faster for row in rows)
    console.print(f"{faster} of {len(rows)} kinds of calls by the fused kernels; written to {file}")
