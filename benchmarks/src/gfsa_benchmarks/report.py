"""Rows of a benchmark as printed tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from gfsa_benchmarks.harness import Row


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
