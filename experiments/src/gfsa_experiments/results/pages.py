"""Pages: how numbers are printed, blocks of text and tables, and the generated parts of a file.

A generated part stands between two marks. The first one is the command that prints it:

    <!-- gfsa results --show verdicts --recipe pretrain -->
    …
    <!-- end -->
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

import pandas as pd

from gfsa_experiments.results.statistics import Contrast, Interval

if TYPE_CHECKING:
    from rich.console import Console

    from gfsa_experiments.results.tables import Line

NONE = "–"


def number(value: float | None, decimals: int, sign: str = "") -> str:
    """``−0.50``, a dash for None; ``sign="+"`` writes a plus sign as well."""
    if value is None:
        return NONE
    # −0.00 is printed without sign
    return re.sub(r"^-(?=[0.]+$)", "", f"{value:{sign}.{decimals}f}").replace("-", "−")


def signed(value: float | None, decimals: int) -> str:
    return number(value, decimals, "+")


def interval(found: Interval | None, decimals: int, unit: str = "") -> str:
    """``+0.70 (+0.41 … +0.99)``, with the ends if they are known.

    An end that would be rounded to 0 has more digits, so that the reader sees whether 0 is inside.
    """
    if found is None:
        return NONE
    shown = signed(found.mean, decimals) + unit
    if found.low is None or found.high is None:
        return shown
    for end in (found.low, found.high):
        while end and not round(end, decimals) and decimals < 6:
            decimals += 1
    return f"{shown} ({signed(found.low, decimals)} … {signed(found.high, decimals)})"


def percent(found: Interval | None) -> str:
    """``+4.3 % (+1.2 … +7.4)``"""
    return interval(found, 1, " %")


def decimals_for(spread: float | None, size: float) -> int:
    """Decimals for two digits of the spread; without a spread, for four of the number itself."""
    if spread:
        digits = 1 - math.floor(math.log10(spread))
    else:
        digits = 3 - math.floor(math.log10(abs(size))) if size else 2
    return min(max(digits, 1), 5)


def decimals_of_lines(lines: Sequence[Line]) -> int:
    """Enough for the spread over seeds of a typical line."""
    spreads = [line.std for line in lines if line.std]
    sizes = [abs(value) for line in lines for value in line.rows.test]
    return decimals_for(median(spreads) if spreads else None, mean(sizes or [0.0]))


def decimals_of_contrast(found: Contrast | None) -> int:
    """Enough for the spread over pairs."""
    if found is None:
        return 2
    return decimals_for(pd.Series(found.test.values).std(), found.error)


def contrast_cells(found: Contrast | None, decimals: int) -> dict[str, str]:
    """The cells of a comparison by the names of their columns, in all kinds of tables."""
    names = ("pairs", "difference", "on valid", "better", "error reduction", "p", "reading", "at")
    if found is None:
        return dict.fromkeys(names, NONE)
    test = found.test
    cells = (
        str(len(test.seeds)),
        interval(test.interval, decimals),
        interval(found.valid.interval if found.valid else None, decimals),
        f"{test.seeds_better}/{len(test.seeds)}",
        percent(found.reduction),
        p_value(test.p),
        test.reading or NONE,
        found.budget,
    )
    return dict(zip(names, cells, strict=True))


def p_value(value: float | None) -> str:
    if value is None:
        return NONE
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def span(values: Iterable[float], digits: int = 7) -> str:
    """``5``, or ``5–7`` if they differ, with ``digits`` significant digits."""
    ends = sorted(set(values))
    if not ends:
        return NONE
    return "–".join(dict.fromkeys(f"{end:.{digits}g}" for end in (ends[0], ends[-1])))


def ratio(values: Iterable[float]) -> str:
    """``1.62×``, or the range if devices differ."""
    ends = sorted(values)
    if not ends:
        return NONE
    return "–".join(dict.fromkeys(f"{end:.2f}" for end in (ends[0], ends[-1]))) + "×"


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Bullets:
    items: Sequence[str]


@dataclass(frozen=True)
class Grid:
    """A table, a dictionary per row; the columns named in ``words`` are aligned left."""

    rows: Sequence[Mapping[str, str]]
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Commands:
    lines: Sequence[str]


@dataclass(frozen=True)
class Picture:
    path: str
    text: str


Block = Heading | Text | Bullets | Grid | Commands | Picture


def to_markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Bullets(items):
            return "\n".join(f"- {item}" for item in items)
        case Commands(lines):
            return "\n".join(["```", *lines, "```"])
        case Picture(path, text):
            return f"![{text}]({path})"
        case Grid(rows, words):
            columns = list(rows[0])
            rules = ["---" if column in words else "---:" for column in columns]
            cells = [columns, rules, *([row[column] for column in columns] for row in rows)]
            return "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in cells)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def show(blocks: Sequence[Block], console: Console) -> None:
    """Print to a terminal, without pictures and without columns that have no value."""
    from rich.markdown import Markdown

    kept = [_narrowed(block) for block in blocks if not isinstance(block, Picture)]
    console.print(Markdown(to_markdown(kept)))


def _narrowed(block: Block) -> Block:
    if not isinstance(block, Grid):
        return block
    kept = [name for name in block.rows[0] if {row[name] for row in block.rows} != {NONE}]
    return Grid([{name: row[name] for name in kept} for row in block.rows], block.words)


_PART = re.compile(r"<!-- gfsa results(?P<words>[^>]*?) -->(?P<old>.*?)<!-- end -->", re.DOTALL)
_MARK = re.compile(r"<!-- (?:gfsa results[^>]*?|end) -->")


def updated_page(path: Path, text_of: Callable[[str], str]) -> str:
    """The page with every generated part made anew, from the options in its first mark."""
    page = path.read_text(encoding="utf-8")
    if 2 * len(_PART.findall(page)) != len(_MARK.findall(page)):
        raise ValueError(
            f"{path}: every mark <!-- gfsa results … --> needs an <!-- end --> before the next. "
            "Nothing was written"
        )

    def made(part: re.Match[str]) -> str:
        return f"<!-- gfsa results{part['words']} -->\n\n{text_of(part['words'])}\n\n<!-- end -->"

    return _PART.sub(made, page)


def write_pages(pages: Mapping[Path, str]) -> None:
    for path, page in pages.items():
        # an interrupted write leaves the old page
        draft = path.with_name(path.name + ".new")
        draft.write_text(page, encoding="utf-8")
        draft.replace(path)
