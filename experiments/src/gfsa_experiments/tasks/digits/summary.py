"""From runs to statements: means, paired differences, and what they allow one to say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gfsa_experiments.tasks.digits.experiment import Run

Finding = Literal["higher", "lower", "within noise", "unknown"]


@dataclass(frozen=True)
class Paired:
    """Differences to the plain model under the same seed, with a 95 % interval of their mean."""

    differences: list[float]
    mean: float
    lower: float
    upper: float
    finding: Finding


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
    accuracy_difference: Paired | None
    similarity_difference: Paired | None


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """One summary a variant, in the order of the runs; the first variant is the reference."""
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.variant, []).append(run)
    plain = next(iter(grouped.values()))
    return [_summary(mine, plain) for mine in grouped.values()]


def paired(values: Sequence[float], reference: Sequence[float]) -> Paired:
    """Student's interval for the mean of paired differences.

    It speaks of other seeds on the same held-out images; other images add noise of their own.
    """
    differences = [a - b for a, b in zip(values, reference, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return Paired(differences, mean, -math.inf, math.inf, "unknown")
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = student_quantile(len(differences) - 1) * error
    finding: Finding = "within noise"
    if mean - half > 0:
        finding = "higher"
    elif mean + half < 0:
        finding = "lower"
    return Paired(differences, mean, mean - half, mean + half, finding)


def student_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution."""
    # scipy is there: scikit-learn stands on it
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))


def closing(summaries: Sequence[Summary]) -> list[str]:
    """What the numbers say, a sentence for each filter."""
    return [_sentence(each) for each in summaries if each.accuracy_difference is not None]


def _summary(mine: Sequence[Run], plain: Sequence[Run]) -> Summary:
    depths = range(len(mine[0].similarity))
    by_depth = [[run.similarity[depth] for run in mine] for depth in depths]
    is_plain = mine[0].variant == plain[0].variant
    accuracy = [run.accuracy for run in mine]
    return Summary(
        variant=mine[0].variant,
        accuracy=statistics.fmean(accuracy),
        accuracy_std=_std(accuracy),
        parameters_added=mine[0].filter_parameters,
        parameters=mine[0].parameters,
        time_ratio=statistics.median(
            a.seconds / b.seconds for a, b in zip(mine, plain, strict=True)
        ),
        similarity=[statistics.fmean(each) for each in by_depth],
        similarity_std=[_std(each) for each in by_depth],
        accuracy_difference=None if is_plain else paired(accuracy, [r.accuracy for r in plain]),
        similarity_difference=(
            None if is_plain else paired(by_depth[-1], [run.similarity[-1] for run in plain])
        ),
    )


def _sentence(summary: Summary) -> str:
    accuracy, similarity = summary.accuracy_difference, summary.similarity_difference
    assert accuracy is not None
    assert similarity is not None
    seeds = len(accuracy.differences)
    interval = (
        f"{accuracy.mean:+.2f} points, 95 % interval {accuracy.lower:+.2f} to {accuracy.upper:+.2f}"
    )
    better = sum(difference > 0 for difference in accuracy.differences)
    verdict = {
        "higher": f"helps: {interval}, better under {better} of {seeds} seeds",
        "lower": f"hurts: {interval}, better under {better} of {seeds} seeds",
        "within noise": (
            f"makes no difference outside noise: {interval}, better under {better} of {seeds} seeds"
        ),
        "unknown": f"moves accuracy by {accuracy.mean:+.2f} points; one seed says nothing of noise",
    }[accuracy.finding]
    tokens = {
        "higher": "leave the last layer more alike",
        "lower": "leave the last layer less alike",
        "within noise": "leave the last layer about as alike",
        "unknown": "differ in likeness at the last layer",
    }[similarity.finding]
    return f"{summary.variant} {verdict}. Its tokens {tokens} (cosine {similarity.mean:+.3f})."


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
