"""The summary: for each method and task our difference, the paper's, and the verdict."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby

from gfsa_experiments.results.number_format import NONE, Scale, amount, count, scale_of, span
from gfsa_experiments.results.page_blocks import Grid
from gfsa_experiments.results.paper import counterpart
from gfsa_experiments.results.paper_sections import paper_difference
from gfsa_experiments.results.tables import Line, ResultTable


def summary(tables: Sequence[ResultTable], paper: bool) -> Grid:
    """Methods with several choices of options are shown by their range, never by their best."""
    columns = ["task", "scale here", "method", "seeds", "difference to plain, measured", "verdict"]
    if paper:
        columns.insert(5, "difference to plain, paper")
    rows = []
    for table, title in zip(tables, titles(tables), strict=True):
        scale = scale_of(table)
        for method, group in groupby(table.lines, key=lambda line: line.method):
            lines = list(group)
            if method == "plain" and table.plain is not None:
                continue
            row = [_task(table, title), _scale(table), _name(method, lines), _seeds(lines)]
            row += [_measured(lines, scale), _verdict(lines)]
            if paper:
                # the paper's figure for the same options, if there is a single choice here
                options = lines[0].options if len(lines) == 1 else ""
                match = counterpart(table.recipe, table.task, [options])
                row.insert(5, NONE if match is None else paper_difference(match, method, options))
            rows.append(row)
    return Grid(columns, rows, ("task", "scale here", "method", "verdict"))


def titles(tables: Sequence[ResultTable]) -> list[str]:
    """The task of each table, with what distinguishes it from other tables of that task."""
    settings: dict[tuple[str, str], set[str]] = defaultdict(set)
    for table in tables:
        settings[table.recipe, table.task].add(table.settings)
    named = []
    for table in tables:
        of_task = settings[table.recipe, table.task]
        shared = set.intersection(*(set(text.split()) for text in of_task))
        own = " ".join(word for word in table.settings.split() if word not in shared)
        apart = [own or "otherwise"] if len(of_task) > 1 else []
        if table.data is not None:
            apart.append(f"data {table.data or 'not noted'}")
        named.append(f"{table.task} ({', '.join(apart)})" if apart else table.task)
    return named


def _task(table: ResultTable, title: str) -> str:
    return f"{table.recipe}: {title}, {table.metric}{'' if table.higher_is_better else ' ↓'}"


def _scale(table: ResultTable) -> str:
    rows = table.rows
    if rows.empty:
        return NONE
    return f"{count(rows.parameters.median())} parameters, {amount(rows.epochs, 'epoch')}"


def _name(method: str, lines: Sequence[Line]) -> str:
    return lines[0].name if len(lines) == 1 else f"{method}, {len(lines)} choices of options"


def _seeds(lines: Sequence[Line]) -> str:
    compared = [len(line.difference.seeds) for line in lines if line.difference is not None]
    return span(compared)


def _measured(lines: Sequence[Line], scale: Scale) -> str:
    differences = [line.difference for line in lines if line.difference is not None]
    if not differences:
        return NONE
    if len(lines) == 1:
        return scale.difference(differences[0])
    means = sorted(difference.mean for difference in differences)
    ends = dict.fromkeys(scale.signed(end) for end in (means[0], means[-1]))
    return " to ".join(ends)


def _verdict(lines: Sequence[Line]) -> str:
    verdicts: Counter[str] = Counter(
        (line.difference.verdict if line.difference is not None else None) or "no verdict"
        for line in lines
    )
    if len(lines) == 1:
        return next(iter(verdicts))
    order = ("better", "worse", "no difference shown", "no verdict")
    return ", ".join(f"{verdicts[name]} {name}" for name in order if verdicts[name])
