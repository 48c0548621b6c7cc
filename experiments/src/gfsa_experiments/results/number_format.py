"""How numbers are printed: shares in percent, with as many digits as the spread allows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gfsa_experiments.results.contrasts import Contrast
    from gfsa_experiments.results.statistics import Interval
    from gfsa_experiments.results.tables import Line, ResultTable

SHARES = {
    "accuracy",
    "matthews",
    "f1",
    "spearman",
    "pearson",
    "ap",
    "averageprecision",
    "rocauc",
    "auroc",
    "wer",
    "cer",
}
# an error rate can be above 1, if there are insertions
ERROR_RATES = {"wer", "cer"}
NONE = "–"


@dataclass(frozen=True)
class Scale:
    """The number format of one table."""

    factor: int
    decimals: int

    def number(self, value: float | None) -> str:
        return NONE if value is None else number(self.factor * value, self.decimals)

    def signed(self, value: float | None) -> str:
        return NONE if value is None else signed(self.factor * value, self.decimals)

    def interval(self, found: Interval | None) -> str:
        """``+0.70 (+0.41 … +0.99)``, with the ends if they are known.

        An end that would be rounded to 0 has more digits: whether 0 is inside must be seen.
        """
        if found is None:
            return NONE
        if found.low is None or found.high is None:
            return self.signed(found.mean)
        decimals = self.decimals
        for end in (found.low, found.high):
            while end and not round(self.factor * end, decimals) and decimals < 6:
                decimals += 1
        ends = (signed(self.factor * end, decimals) for end in (found.low, found.high))
        return f"{self.signed(found.mean)} ({' … '.join(ends)})"


def scale_of(table: ResultTable) -> Scale:
    return scale_of_lines(table.lines)


def scale_of_lines(lines: Sequence[Line]) -> Scale:
    """Enough digits for the spread over seeds of a typical line; rows have shares in percent."""
    spreads = [line.std for line in lines if line.std]
    sizes = [abs(value) for line in lines for value in line.rows.test]
    return Scale(1, decimals_for(median(spreads) if spreads else None, mean(sizes or [0.0])))


def contrast_cells(found: Contrast | None, scale: Scale) -> dict[str, str]:
    """The cells of a comparison by the names of their columns, in all kinds of tables."""
    names = (
        "difference",
        "error reduction",
        "better",
        "p",
        "reading",
        "on valid",
        "at",
        "one commit",
    )
    if found is None:
        return dict.fromkeys(names, NONE)
    test, pairs = found.test, len(found.test.seeds)
    cells = (
        scale.interval(test.interval),
        percent(found.reduction),
        f"{test.seeds_better}/{pairs}",
        p_value(test.p),
        test.reading or NONE,
        scale.interval(found.valid.interval if found.valid else None),
        found.budget,
        NONE if found.one_commit is None else f"{found.one_commit}/{pairs}",
    )
    return dict(zip(names, cells, strict=True))


def percent_factor(metric: str, values: Iterable[float]) -> int:
    """100 for a share that is given as a fraction, 1 for everything else."""
    name = re.sub(r"[^a-z0-9]", "", metric.lower().partition("(")[0])
    most = max((abs(value) for value in values), default=0.0)
    fraction = most <= (2 if name in ERROR_RATES else 1)
    return 100 if name in SHARES and fraction else 1


def decimals_for(spread: float | None, size: float) -> int:
    """Decimals for two digits of the spread; without a spread, for four of the number itself."""
    if spread:
        digits = 1 - math.floor(math.log10(spread))
    else:
        digits = 3 - math.floor(math.log10(abs(size))) if size else 2
    return min(max(digits, 1), 5)


def number(value: float | None, decimals: int) -> str:
    return NONE if value is None else _minus(f"{value:.{decimals}f}")


def signed(value: float | None, decimals: int) -> str:
    return NONE if value is None else _minus(f"{value:+.{decimals}f}")


def span(values: Iterable[float], digits: int = 7) -> str:
    """``5``, or ``5–7`` if runs differ, with ``digits`` significant digits."""
    ends = sorted(set(values))
    if not ends:
        return NONE
    return "–".join(dict.fromkeys(f"{end:.{digits}g}" for end in (ends[0], ends[-1])))


def amount(values: Iterable[float], what: str) -> str:
    """``5 epochs``, ``1 epoch``"""
    text = span(values)
    return f"{text} {what}" if text == "1" else f"{text} {what}s"


def ratio(values: Iterable[float]) -> str:
    """``1.62×``, or the range if devices differ."""
    ends = sorted(values)
    if not ends:
        return NONE
    low, high = f"{ends[0]:.2f}", f"{ends[-1]:.2f}"
    return f"{low}×" if low == high else f"{low}–{high}×"


def count(value: float) -> str:
    """``22.7M``"""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"


def percent(found: Interval | None) -> str:
    """``+4.3 % (+1.2 … +7.4)``"""
    if found is None:
        return NONE
    mean, space, ends = Scale(1, 1).interval(found).partition(" ")
    return f"{mean} %{space}{ends}"


def p_value(value: float | None) -> str:
    if value is None:
        return NONE
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _minus(text: str) -> str:
    # −0.00 is printed without sign
    return re.sub(r"^-(?=[0.]+$)", "", text).replace("-", "−")
