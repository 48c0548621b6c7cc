"""Pairs of lines named by a text such as ``gfsa filter_lr=0.01 - degree1``, and their contrasts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from gfsa_experiments.results.contrasts import Contrast, contrast
from gfsa_experiments.results.number_format import contrast_cells, scale_of
from gfsa_experiments.results.tables import Line, ResultTable

Place = tuple[ResultTable, Line]


def pair_cells(tables: Sequence[ResultTable], text: str) -> list[dict[str, str]]:
    """A row of a table for each contrast that the text asks for."""
    of_a, of_b = sides(text)
    rows = []
    for table, a, b, found in find_pairs(tables, text):
        arrow = "" if table.higher_is_better else " ↓"
        line = {
            "task": f"{table.recipe}: {table.task}, {table.metric}{arrow}",
            "a": _asked_name(a, of_a),
            "b": _asked_name(b, of_b),
            "pairs": str(len(found.test.seeds)),
        }
        rows.append(line | contrast_cells(found, scale_of(table)))
    return rows


def find_pairs(
    tables: Sequence[ResultTable], text: str
) -> list[tuple[ResultTable, Line, Line, Contrast]]:
    """The contrast ``A - B`` of every task that has both lines.

    A line is a method and some of its options or settings. Where one table has both, they are
    compared in it; otherwise each must be a single line of the task, with settings of its own.
    """
    parts = sides(text)
    found = []

    def task(table: ResultTable) -> tuple[str, str, str]:
        return table.recipe, table.task, table.data or ""

    for _, group in groupby(sorted(tables, key=task), key=task):
        own = list(group)
        a, b = (_matching(own, part) for part in parts)
        pairs = [(x, y) for x in a for y in b if x[0] is y[0]]
        if not pairs and a and b:
            pairs = [(_single(a, parts[0]), _single(b, parts[1]))]
            refuse_other_data(pairs[0][0][1], pairs[0][1][1])
        for (table, line), (_, other) in pairs:
            compared = contrast(line.rows, other.rows)
            if line is not other and compared is not None:
                found.append((table, line, other, compared))
    return found


def sides(text: str) -> list[str]:
    """``A`` and ``B`` of ``A - B``."""
    parts = [part.strip() for part in re.split(r"\s[-−]\s", text)]
    if len(parts) != 2 or not all(parts):
        raise ValueError(
            f"--contrast takes 'A - B', two lines of a table or of a family, got {text!r}"
        )
    return parts


def has_words(line: Line, settings: str, text: str) -> bool:
    """Whether a line, in a table with these settings, is of this method and has these words."""
    method, *wanted = text.split()
    return line.method == method and set(wanted) <= {*settings.split(), *line.options.split()}


def _asked_name(line: Line, text: str) -> str:
    """The name of a line, and the settings by which it was asked for: its table has them."""
    known = line.name.split()
    return " ".join([*known, *(word for word in text.split() if word not in known)])


def _matching(tables: Sequence[ResultTable], text: str) -> list[Place]:
    """The lines that have these words; in a table those with the fewest other options."""
    found = []
    for table in tables:
        lines = [line for line in table.lines if has_words(line, table.settings, text)]
        fewest = min((len(line.options.split()) for line in lines), default=0)
        found += [(table, line) for line in lines if len(line.options.split()) == fewest]
    return found


def _single(places: Sequence[Place], text: str) -> Place:
    """The line with the fewest settings that were not asked for, if there is one such."""
    sizes = [len(f"{line.options} {table.settings}".split()) for table, line in places]
    if sizes.count(min(sizes)) > 1:
        names = [f"{line.name} ({table.settings})" for table, line in places]
        raise ValueError(f"{text!r} is more than one line; name more settings; {_list(names)}")
    return places[sizes.index(min(sizes))]


def refuse_other_data(a: Line, b: Line) -> None:
    """Raise ValueError if no row of one line is on the data of the other, as far as it is known."""
    first, second = (set(line.rows.data) - {""} for line in (a, b))
    if first and second and first.isdisjoint(second):
        names = [
            f"{line.name} on {', '.join(sorted(data))}" for line, data in ((a, first), (b, second))
        ]
        raise ValueError(f"lines on different data are not compared: {'; '.join(names)}")


def _list(names: Sequence[str]) -> str:
    return f"there are {', '.join(names[:20])}{', …' if len(names) > 20 else ''}"
