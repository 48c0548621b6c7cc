"""From the demo's runs to statements: means, paired differences and a verdict for each filter."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from gfsa_experiments.results.statistics import PairedDifference, paired_difference


@dataclass(frozen=True)
class DemoRun:
    """The results of one training run."""

    variant: str
    seed: int
    accuracy: float
    """Percent of the held-out images."""
    seconds: float
    """Of training alone."""
    parameters: int
    filter_parameters: int
    similarity: list[float]
    """Of the tokens that enter the first block and leave each block."""
    coefficients: list[list[list[float]]] = field(repr=False)
    """By layer, head and power."""


@dataclass(frozen=True)
class Summary:
    """A variant over its seeds."""

    variant: str
    accuracy: float
    accuracy_std: float
    parameters_added: int
    parameters: int
    time_ratio: float
    similarity: list[float]
    similarity_std: list[float]
    accuracy_difference: PairedDifference | None
    similarity_difference: PairedDifference | None


def summarise(runs: Sequence[DemoRun]) -> list[Summary]:
    """A summary per variant, in the order of the runs; the first variant is the reference."""
    grouped: dict[str, list[DemoRun]] = {}
    for run in runs:
        grouped.setdefault(run.variant, []).append(run)
    plain = next(iter(grouped.values()))
    return [_summary(of_variant, plain) for of_variant in grouped.values()]


def _summary(runs: Sequence[DemoRun], plain: Sequence[DemoRun]) -> Summary:
    by_depth = list(zip(*(run.similarity for run in runs), strict=True))
    accuracy = [run.accuracy for run in runs]
    is_plain = runs[0].variant == plain[0].variant

    def difference(depth: int | None) -> PairedDifference | None:
        def values(of: Sequence[DemoRun]) -> dict[int, float]:
            return {r.seed: r.accuracy if depth is None else r.similarity[depth] for r in of}

        return None if is_plain else paired_difference(values(plain), values(runs), True)

    return Summary(
        variant=runs[0].variant,
        accuracy=statistics.fmean(accuracy),
        accuracy_std=_std(accuracy),
        parameters_added=runs[0].filter_parameters,
        parameters=runs[0].parameters,
        time_ratio=statistics.median(
            run.seconds / reference.seconds for run, reference in zip(runs, plain, strict=True)
        ),
        similarity=[statistics.fmean(values) for values in by_depth],
        similarity_std=[_std(values) for values in by_depth],
        accuracy_difference=difference(None),
        similarity_difference=difference(-1),
    )


def closing(summaries: Sequence[Summary]) -> list[str]:
    """A sentence for each filter."""
    return [_sentence(summary) for summary in summaries if summary.accuracy_difference is not None]


def _sentence(summary: Summary) -> str:
    accuracy, similarity = summary.accuracy_difference, summary.similarity_difference
    assert accuracy is not None
    assert similarity is not None
    seeds = len(accuracy.seeds)
    if accuracy.low is None or accuracy.high is None:
        noise = "one seed says nothing about noise" if seeds == 1 else "the same under every seed"
        verdict = f"moves accuracy by {accuracy.mean:+.2f} points; {noise}"
    else:
        effect = {"better": "helps", "worse": "hurts"}.get(
            accuracy.verdict or "", "makes no difference outside noise"
        )
        verdict = (
            f"{effect}: {accuracy.mean:+.2f} points, 95 % interval {accuracy.low:+.2f} to "
            f"{accuracy.high:+.2f}, better under {accuracy.seeds_better} of {seeds} seeds"
        )
    tokens = {
        "better": "leave the last layer more alike",
        "worse": "leave the last layer less alike",
        "no difference shown": "leave the last layer about as alike",
        None: "differ in similarity at the last layer",
    }[similarity.verdict]
    return f"{summary.variant} {verdict}. Its tokens {tokens} (cosine {similarity.mean:+.3f})."


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
