"""The demo's runs as a table of results, and a sentence for each filter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gfsa_experiments.results.load_rows import latest
from gfsa_experiments.results.statistics import PairedDifference, paired_difference
from gfsa_experiments.results.tables import ResultTable, make_tables
from gfsa_experiments.runs.row import Row


@dataclass(frozen=True)
class DemoRun:
    """The results of one training run."""

    row: Row
    """Its method is the name of the variant, and ``test`` the accuracy on the held-out images."""
    similarity: list[float]
    """Of the tokens that enter the first block and leave each block."""
    coefficients: list[list[list[float]]] = field(repr=False)
    """By layer, head and power."""


def table_of(runs: Sequence[DemoRun]) -> ResultTable:
    """Means over seeds, and paired differences to plain."""
    (table,) = make_tables(latest([run.row for run in runs]))
    return table


def findings(runs: Sequence[DemoRun]) -> list[str]:
    """A sentence for each filter."""
    last: dict[str, dict[int, float]] = {}
    for run in runs:
        last.setdefault(run.row.method, {})[run.row.seed] = run.similarity[-1]
    return [
        f"{line.method} {_verdict(line.difference)}. Its tokens "
        f"{_likeness(paired_difference(last['plain'], last[line.method], True))}."
        for line in table_of(runs).lines
        if line.difference is not None
    ]


def _verdict(accuracy: PairedDifference) -> str:
    seeds = len(accuracy.seeds)
    if accuracy.low is None or accuracy.high is None:
        noise = "one seed says nothing about noise" if seeds == 1 else "the same under every seed"
        return f"moves accuracy by {accuracy.mean:+.2f} points; {noise}"
    effect = {"better": "helps", "worse": "hurts"}.get(
        accuracy.verdict or "", "makes no difference outside noise"
    )
    return (
        f"{effect}: {accuracy.mean:+.2f} points, 95 % interval {accuracy.low:+.2f} to "
        f"{accuracy.high:+.2f}, better under {accuracy.seeds_better} of {seeds} seeds"
    )


def _likeness(similarity: PairedDifference | None) -> str:
    assert similarity is not None
    words = {
        "better": "leave the last layer more alike",
        "worse": "leave the last layer less alike",
        "no difference shown": "leave the last layer about as alike",
        None: "differ in similarity at the last layer",
    }[similarity.verdict]
    return f"{words} (cosine {similarity.mean:+.3f})"
