"""The contrasts that ``--contrast`` asks for, of exploratory tables and of complete families."""

from __future__ import annotations

from collections.abc import Sequence

from gfsa_experiments.results.family_pairs import find_family_pairs, named_lines
from gfsa_experiments.results.family_summary import Judged, is_complete, lines_of
from gfsa_experiments.results.line_pairs import has_words, pair_cells, sides
from gfsa_experiments.results.page_blocks import Block, Grid, Text
from gfsa_experiments.results.tables import ResultTable

WORDS = ("family", "task", "a", "b", "kind", "reading", "at")
OF_TABLES = "Exploratory, not corrected for their number:"
OF_FAMILIES = (
    "Lines of families. *registered*: the family's own comparison, with Holm's p over the family "
    "and its verdict. *exploratory*: any other, not corrected for their number:"
)
_MOST = 20
"""Names in a message."""


def contrast_blocks(
    tables: Sequence[ResultTable], judged: Sequence[Judged], texts: Sequence[str]
) -> list[Block]:
    """Every contrast ``A - B`` of the texts; a ValueError says which lines there are instead.

    Families that lack runs are left out: nothing of a family is compared before its last run.
    """
    complete = [(family, outcomes) for family, outcomes in judged if is_complete(outcomes)]
    exploratory: list[dict[str, str]] = []
    of_families: list[dict[str, str]] = []
    for text in texts:
        own = pair_cells(tables, text)
        pairs = find_family_pairs(complete, text)
        if not own and not pairs:
            raise ValueError(_nothing_found(tables, complete, text))
        exploratory += own
        of_families += [pair.cells() for pair in pairs]
    blocks: list[Block] = []
    for said, rows in ((OF_TABLES, exploratory), (OF_FAMILIES, of_families)):
        if rows:
            grid = Grid(list(rows[0]), [list(row.values()) for row in rows], WORDS)
            blocks += [Text(said), grid]
    return blocks


def family_contrast_blocks(judged: Judged, texts: Sequence[str]) -> list[Block]:
    """The same of one family alone, which has to be complete."""
    family, outcomes = judged
    if not is_complete(outcomes):
        raise ValueError(
            f"the family {family.name} is not complete, and nothing of a family is compared before "
            f"its last run; `gfsa results --family {family.name}` says what it lacks"
        )
    return contrast_blocks([], [judged], texts)


def _nothing_found(tables: Sequence[ResultTable], complete: Sequence[Judged], text: str) -> str:
    lines = {family.name: lines_of(outcomes) for family, outcomes in complete}
    unknown = [
        repr(side)
        for side in sides(text)
        if not any(has_words(line, t.settings, side) for t in tables for line in t.lines)
        and not any(named_lines(own, side) for own in lines.values())
    ]
    why = f": there is no line {' and no line '.join(unknown)}" if unknown else ""
    there = [_listed(sorted({line.name for table in tables for line in table.lines}))]
    there += [
        f"{_listed([one.name for one in own])} in the family {name}" for name, own in lines.items()
    ]
    known = "; ".join(filter(None, there)) or "none"
    return f"no task has both lines of {text!r} over common seeds{why}; there are {known}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names[:_MOST])) + (", …" if len(names) > _MOST else "")
