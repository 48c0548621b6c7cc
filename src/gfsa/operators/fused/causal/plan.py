"""How the kernels of one sweep cut their work, and in which order programs take it."""

from __future__ import annotations

from typing import NamedTuple


class RowPlan(NamedTuple):
    """The forward kernel."""

    rows: int
    """Queries a block."""
    cols: int
    """Keys at a time, a divisor of ``rows``."""
    warps: int
    stages: int
    """Depth of the load pipeline."""
    wave: bool
    """A program a block, which waits for the blocks before it; else a program a head."""


class ColumnPlan(NamedTuple):
    """The backward kernel."""

    rows: int
    """Keys a block."""
    cols: int
    """Queries at a time, a divisor of ``rows``."""
    warps: int
    stages: int
    wave: bool
    """A program a block, which follows the block after it; else a program a head."""
    chunk: int = 4
    """Tiles of queries after which a program of a wave says how far it is."""
    values: bool = True
    """Work out the gradients of values and coefficients."""
    scores: bool = True
    """Work out the gradients of queries and keys."""
    atomic: bool = False
    """dQ is added up by atomic additions; else by loads and stores."""


# a program a head keeps this many programs on a multiprocessor busy, or a wave takes over
HEADS_PER_MULTIPROCESSOR = 1.8


def takes_wave(heads: int, multiprocessors: int) -> bool:
    """Whether there are too few heads, of all sequences, for a program each."""
    return heads < HEADS_PER_MULTIPROCESSOR * multiprocessors


def row_plan(head_dim: int, wave: bool) -> RowPlan:
    if head_dim <= 64:
        return RowPlan(64, 64, 4, 2, wave)
    return RowPlan(128, 64, 8, 2, wave)


def column_plans(head_dim: int, wave: bool) -> tuple[ColumnPlan, ...]:
    """One sweep; or two, the first for the values, where registers are too few for one."""
    if head_dim <= 64:
        return (ColumnPlan(128, 64, 8, 2, wave) if wave else ColumnPlan(64, 64, 4, 2, wave),)
    return (
        ColumnPlan(128, 64, 8, 2, wave, scores=False),
        ColumnPlan(128, 64, 8, 1, wave, values=False),
    )
