"""The demo's runs as a table of results, and a sentence for each filter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from gfsa_experiments.demo.comparison import LONGER
from gfsa_experiments.results.statistics import PairedDifference, paired_difference
from gfsa_experiments.results.tables import ResultTable, latest, make_tables
from gfsa_experiments.runs.row import Row

# what a difference of each metric is counted in
UNITS = {"accuracy": "points of accuracy", "bits_per_byte": "bits per byte"}


@dataclass(frozen=True)
class DemoRun:
    """The results of one training run."""

    row: Row
    """Its method is the name of the variant, and ``test`` the metric on the held-out part."""
    similarity: list[float]
    """Of the tokens that enter the first block and leave each block."""
    coefficients: list[list[list[float]]] = field(repr=False)
    """By layer, head and power."""
    curve: list[tuple[int, float]] = field(default_factory=list, repr=False)
    """The metric on the validation part, by step."""


def table_of(runs: Sequence[DemoRun]) -> ResultTable:
    """Means over seeds, and paired differences to plain."""
    (table,) = make_tables(latest([run.row for run in runs]))
    return table


def time_ratio(runs: Sequence[DemoRun], variant: str) -> float | None:
    """The time of a step relative to plain under the same seed, the median over seeds."""
    plain = {run.row.seed: run.row.seconds_per_step for run in runs if run.row.method == "plain"}
    ratios = [
        run.row.seconds_per_step / plain[run.row.seed]
        for run in runs
        if run.row.method == variant and plain.get(run.row.seed)
    ]
    return median(ratios) if ratios else None


def findings(runs: Sequence[DemoRun]) -> list[str]:
    """A sentence for each filter."""
    last: dict[str, dict[int, float]] = {}
    for run in runs:
        last.setdefault(run.row.method, {})[run.row.seed] = run.similarity[-1]
    unit = UNITS.get(runs[0].row.metric, runs[0].row.metric)
    sentences = [
        f"{line.method} {_verdict(line.difference, unit)}. {_coefficients(line.coefficients)}"
        "Its tokens "
        f"{_likeness(paired_difference(last['plain'], last[line.method], True))}."
        for line in table_of(runs).lines
        if line.difference is not None
    ]
    return sentences + _equal_time(runs, unit)


def _equal_time(runs: Sequence[DemoRun], unit: str) -> list[str]:
    """GFSA against the plain model that trains about as long, in time, as GFSA does."""
    scores: dict[str, dict[int, float]] = {}
    for run in runs:
        scores.setdefault(run.row.method, {})[run.row.seed] = run.row.test
    found = []
    for name in scores:
        if name.startswith("GFSA") and LONGER in scores:
            up = runs[0].row.higher_is_better
            change = paired_difference(scores[LONGER], scores[name], up)
            ratio = time_ratio(runs, name)
            assert change is not None
            assert ratio is not None
            found.append(
                f"A step of {name} took {ratio:.2f} times that of plain here. Against {LONGER}, "
                f"which is about equal time on an idle machine, {_time_verdict(change, unit)}."
            )
    return found


def _time_verdict(change: PairedDifference, unit: str) -> str:
    text = f"the difference is {change.mean:+.3f} {unit}"
    if change.low is None or change.high is None:
        return text
    words = {"better": "it saves time, too", "worse": "it saves steps at best, no time"}.get(
        change.verdict or "", "that it saves time is not shown"
    )
    return f"{text} (95 % interval {change.low:+.3f} to {change.high:+.3f}): {words}"


def _verdict(change: PairedDifference, unit: str) -> str:
    seeds = len(change.seeds)
    if change.low is None or change.high is None:
        noise = "one seed says nothing about noise" if seeds == 1 else "the same under every seed"
        return f"changes the result by {change.mean:+.3f} {unit}; {noise}"
    effect = {"better": "helps", "worse": "hurts"}.get(
        change.verdict or "", "makes no difference outside noise"
    )
    return (
        f"{effect}: {change.mean:+.3f} {unit}, 95 % interval {change.low:+.3f} to "
        f"{change.high:+.3f}, better under {change.seeds_better} of {seeds} seeds"
    )


def _coefficients(means: tuple[float, ...] | None) -> str:
    if means is None:
        return ""
    numbers = ", ".join(f"{value:.2f}" for value in means)
    names = ", ".join(f"c{power}" for power in range(len(means)))
    return f"Training moved the mean coefficients ({names}) to ({numbers}). "


def _likeness(similarity: PairedDifference | None) -> str:
    assert similarity is not None
    words = {
        "better": "leave the last layer more alike",
        "worse": "leave the last layer less alike",
        "no difference shown": "leave the last layer about as alike",
        None: "differ in similarity at the last layer",
    }[similarity.verdict]
    low, high = similarity.low, similarity.high
    interval = "" if low is None or high is None else f", {low:+.3f} to {high:+.3f}"
    return f"{words} (cosine {similarity.mean:+.3f}{interval})"
