"""The verdicts of a family: none before its last run, then Holm's over all its comparisons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pandas as pd

from gfsa_experiments.results.contrasts import Contrast, contrast, finite
from gfsa_experiments.results.families import Comparison, Family, is_of
from gfsa_experiments.results.statistics import LEVEL, holm
from gfsa_experiments.results.tables import Line


@dataclass(frozen=True)
class Outcome:
    """One comparison of a family; until all its pairs count, nothing is compared."""

    comparison: Comparison
    missing: int
    """Pairs that lack a row."""
    unusable: dict[str, int] = field(default_factory=dict)
    """Why pairs that have both rows do not count → how many; no further run can change that."""
    failed: int = 0
    """Pairs of which a run ended without a finite number."""
    contrast: Contrast | None = None
    p_holm: float | None = None
    lines: dict[str, Line] = field(default_factory=dict)
    """The runs of ``a`` and ``b`` by these names; none before the family is complete."""

    @property
    def pairs(self) -> int:
        """The pairs that count."""
        return len(self.comparison.seeds) - self.missing - sum(self.unusable.values())

    @property
    def is_complete(self) -> bool:
        return self.pairs == len(self.comparison.seeds)

    @property
    def verdict(self) -> str:
        """*better* or *worse* where Holm's p is below 0.05; that of ``a``, compared with ``b``."""
        if self.unusable:
            reasons = ", ".join(f"{count} {why}" for why, count in self.unusable.items())
            return (
                f"{reasons}, of {len(self.comparison.seeds)} pairs: no verdict. A run of a family "
                "is not repeated: register another family with fresh seeds, and run it at one "
                "commit without local changes"
            )
        if self.missing:
            return f"{self.missing} of {len(self.comparison.seeds)} pairs missing: no verdict"
        if self.failed:
            return f"not finite in {self.failed} of {len(self.comparison.seeds)} pairs: no verdict"
        if self.contrast is None:
            return "other pairs of the family missing or unusable: no verdict"
        found = self.contrast.test
        if self.p_holm is not None and found.verdict is not None and self.p_holm < 1 - LEVEL:
            # adjusted p values are never below the unadjusted: the interval excludes 0 as well
            return found.verdict
        return found.reading or "not shown"


def outcomes(family: Family, rows: pd.DataFrame) -> list[Outcome]:
    """Every comparison of a family; ``rows`` has one row per run."""
    found = [_outcome(comparison, rows) for comparison in family.comparisons]
    if not all(outcome.is_complete for outcome in found):
        # no peeking: a family is read when it is complete
        return [replace(outcome, failed=0, contrast=None, lines={}) for outcome in found]
    # a comparison without a p value still counts among those that are corrected for
    tests = [outcome.contrast.test.p if outcome.contrast is not None else None for outcome in found]
    adjusted = holm([1.0 if p is None else p for p in tests])
    return [replace(outcome, p_holm=p) for outcome, p in zip(found, adjusted, strict=True)]


def _outcome(comparison: Comparison, rows: pd.DataFrame) -> Outcome:
    a, b = (rows[is_of(rows, set(comparison.keys(line)))] for line in (comparison.a, comparison.b))
    if a.seed.duplicated().any() or b.seed.duplicated().any():
        raise ValueError(f"{comparison.name}: runs of a family must all be on the same data")
    pairs = a.merge(b, on="seed", suffixes=("_a", "_b"))
    # a pair on two data sets does not count, below
    data = sorted(set(pairs.data_a[pairs.data_a == pairs.data_b]) - {""})
    if len(data) > 1:
        raise ValueError(
            f"{comparison.name}: runs of a family must all be on the same data, these are on "
            f"{'; '.join(data)}"
        )
    reasons = pd.Series([_refusal_of(*pair) for pair in _facts(pairs)], pairs.index, dtype=object)
    missing = len(comparison.seeds) - len(pairs)
    unusable = reasons.dropna().value_counts(sort=False).to_dict()
    failed = len(pairs) - len(finite(a).merge(finite(b), on="seed"))
    found = None if failed else contrast(a, b)
    lines = {comparison.a: a, comparison.b: b}
    return Outcome(
        comparison,
        missing,
        unusable,
        failed,
        found,
        lines={name: _line(rows) for name, rows in lines.items() if len(rows)},
    )


def _line(rows: pd.DataFrame) -> Line:
    rows = rows.sort_values("seed", kind="stable")
    kept = finite(rows)
    failed = tuple(rows.seed.drop(kept.index))
    return Line(rows.method.iloc[0], rows.options.iloc[0], kept, failed)


def _facts(pairs: pd.DataFrame) -> Iterable[tuple[str, str, str, str]]:
    return zip(pairs.commit_a, pairs.commit_b, pairs.data_a, pairs.data_b, strict=True)


def _refusal_of(commit_a: str, commit_b: str, data_a: str, data_b: str) -> str | None:
    """Why the two rows of a seed are not compared: something else may differ than their lines."""
    if not (commit_a and commit_b):
        return "without a commit"
    if any(commit.endswith("-dirty") for commit in (commit_a, commit_b)):
        return "with local changes"
    if commit_a != commit_b:
        return "of two commits"
    return "on two data sets" if data_a != data_b else None
