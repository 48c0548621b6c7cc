"""``gfsa tune``: measure the fused kernels on the GPU at hand, for ``auto`` to choose by."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

if TYPE_CHECKING:
    from gfsa.kernels.tuned import Machine, Row, Shape


class Subject(Protocol):
    """What is measured: a GPU, or a stand-in for one."""

    @property
    def machine(self) -> Machine: ...

    def refusal(self, shape: Shape) -> str | None:
        """Why the fused kernels cannot serve such a call there, or None."""

    def prepare(self, shapes: Sequence[Shape]) -> Iterator[Shape]:
        """Compile the kernels of such calls, as many at a time as it can; yields each when done."""

    def errors(self, shape: Shape) -> tuple[float, float]:
        """Errors of the fused kernels and of torch's against the dense operator in float64."""

    def times(self, shape: Shape) -> tuple[float, float]:
        """Milliseconds, forward and backward, by the fused kernels and by torch's."""


def all_shapes() -> Iterator[Shape]:
    """The kinds of calls that are measured."""
    from gfsa.kernels.tuned import HEAD_DIMS, LENGTHS, Shape

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
    on_compiled: Callable[[int, int], None] = lambda done, of: None,
) -> list[Row]:
    """A row for each shape that the fused kernels serve; exactness first, then times.

    Args:
        on_row: called with each shape and its row, or the reason why there is none.
        on_compiled: called with the number of shapes that are compiled, and of all of them.
    """
    from gfsa.kernels.tuned import Row

    refusals = {shape: subject.refusal(shape) for shape in shapes}
    served = [shape for shape, refusal in refusals.items() if refusal is None]
    # before anything is timed: compilers would take the host's time
    for done, _ in enumerate(subject.prepare(served), 1):
        on_compiled(done, len(served))
    rows = []
    for shape, refusal in refusals.items():
        if refusal is not None:
            on_row(shape, refusal)
            continue
        try:
            errors = subject.errors(shape)
            row = Row(shape, *subject.times(shape), *errors)
        except Exception as error:
            # a compiler or a driver may raise anything on a GPU that was never measured; the other
            # shapes may still run
            on_row(shape, f"failed: {type(error).__name__}: {error}")
            continue
        rows.append(row)
        on_row(shape, row)
    return rows


def tune(
    device: Annotated[str, typer.Option(help="cuda, cuda:1 …")] = "cuda",
) -> None:
    """Check and time the fused kernels on this GPU, once; `auto` chooses by the result."""
    import torch

    from gfsa.kernels import tuned

    if not torch.cuda.is_available():
        typer.echo("gfsa tune measures kernels on a GPU, and torch sees none here", err=True)
        raise typer.Exit(2)
    known = ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if device not in known:
        typer.echo(f"gfsa tune: --device is one of {', '.join(known)}, got {device!r}", err=True)
        raise typer.Exit(2)
    from gfsa.kernels.tune_gpu import GPU

    subject, shapes = GPU(torch.device(device)), list(all_shapes())
    rows: list[Row] = []
    reasons: set[str] = set()
    shown = itertools.count(1)

    def show(shape: Shape, row: Row | str) -> None:
        found = "not served"
        if isinstance(row, str):
            reasons.add(row)
        else:
            rows.append(row)
            found = f"{row.fused_ms:8.3f} {row.torch_ms:8.3f}  {_chosen(row)}"
        typer.echo(f"{next(shown):3d} of {len(shapes)}  {_columns(shape)}  {found}")

    def count(done: int, of: int) -> None:
        # one line for a while, then one for all: compiling takes half of the time
        if done % 8 == 0 or done == of:
            typer.echo(f"compiled {done} of {of}")

    file, interrupted = tuned.path(), False
    typer.echo(f"measures {len(shapes)} kinds of calls, and writes what it finds to {file}")
    typer.echo("           degree  head dim  tokens  kind            fused ms torch ms  chosen")
    try:
        measure(subject, shapes, show, count)
    except KeyboardInterrupt:
        interrupted = True
    for reason in sorted(reasons):
        typer.echo(f"not served: {reason}")
    if not rows:
        why = "interrupted" if interrupted else "the fused kernels serve no call on this GPU"
        typer.echo(f"{why}: nothing was written", err=True)
        raise typer.Exit(130 if interrupted else 1)
    if interrupted:
        tuned.update(file, subject.machine, rows)
        typer.echo(f"interrupted: the {len(rows)} kinds that were measured are in {file}", err=True)
        raise typer.Exit(130)
    tuned.write(file, subject.machine, rows)
    faster = sum(row.is_faster for row in rows)
    typer.echo(f"{faster} of {len(rows)} kinds of calls by the fused kernels; written to {file}")


def _chosen(row: Row) -> str:
    if row.is_faster:
        return "fused"
    return "torch" if row.is_right else "torch (fused is not exact)"


def _columns(shape: Shape) -> str:
    kind = " ".join(
        name for name, is_so in (("causal", shape.causal), ("padded", shape.masked)) if is_so
    )
    return f"{shape.degree:6d}  {shape.head_dim:8d}  {shape.tokens:6d}  {kind:14s}"
