"""The tables of a recipe as sections of a page, with their notes and commands."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pandas as pd

from gfsa_experiments.results.notes import FOOTNOTES, notes_of
from gfsa_experiments.results.number_format import (
    NONE,
    Scale,
    amount,
    contrast_cells,
    count,
    number,
    ratio,
    scale_of,
    span,
)
from gfsa_experiments.results.page_blocks import Block, Bullets, Commands, Grid, Heading, Text
from gfsa_experiments.results.paper import SOURCE, Counterpart, counterpart
from gfsa_experiments.results.paper_sections import paper_blocks, paper_difference
from gfsa_experiments.results.tables import (
    Line,
    ResultTable,
    peak_memory,
    seconds_per_step,
    titles,
)

_SEEDS = "--seeds …"


def sections(tables: Sequence[ResultTable], paper: bool) -> list[Block]:
    """Every table with its notes, and how to read them; ``paper``: its figures beside ours."""
    blocks: list[Block] = []
    for table, title in zip(tables, titles(tables), strict=True):
        blocks.extend(section(table, title, paper))
    blocks += [Heading("How to read the tables", 3), Bullets(FOOTNOTES)]
    if paper:
        blocks.append(
            Text(
                f"Figures of the paper are typed in from {SOURCE}; they were not measured here, "
                "and at another scale: they are no target for runs of ours."
            )
        )
    return blocks


def section(table: ResultTable, title: str, paper: bool) -> list[Block]:
    """One table with its notes and commands."""
    match = _counterpart(table) if paper else None
    blocks: list[Block] = [
        Heading(f"{table.recipe}: {title}", 3),
        Text(describe(table)),
        _comparisons(table, match),
        _filters_and_costs(table),
    ]
    notes = notes_of(table)
    if notes:
        blocks.append(Bullets(notes))
    commands = commands_of(table.rows)
    if commands:
        blocks.append(Commands(commands))
    if match is not None:
        blocks += paper_blocks(match)
    elif paper:
        blocks.append(Text("The paper has no counterpart of this task."))
    return blocks


def describe(table: ResultTable) -> str:
    """Metric, size and machine in a sentence."""
    better = "higher" if table.higher_is_better else "lower"
    rows = table.rows
    parts = [f"{table.metric} on the test split, {better} is better"]
    if len(rows):
        parts.append(f"{count(rows.parameters.median())} parameters")
        parts.append(amount(rows.epochs, "epoch"))
        parts.append(amount(rows.steps, "step"))
    parts += sorted(set(rows.device) - {""}) + sorted(set(rows.precision) - {""})
    settings = f"`{table.settings}`, others" if table.settings else "all"
    return f"{', '.join(parts)}. Settings: {settings} by default."


def _comparisons(table: ResultTable, match: Counterpart | None) -> Grid:
    scale, rows = scale_of(table), []
    for line in table.lines:
        spread = "" if line.std is None else f" ± {scale.number(line.std)}"
        cells = {
            "method": line.name,
            "seeds": str(len(line.rows)),
            table.metric: scale.number(line.mean) + spread,
            **_differences(line, scale),
        }
        if match is not None:
            cells["paper"] = paper_difference(match, line.method, line.options)
        rows.append(cells)
    return Grid(list(rows[0]), [list(row.values()) for row in rows], ("method", "exploratory"))


def _differences(line: Line, scale: Scale) -> dict[str, str]:
    found = contrast_cells(line.to_plain, scale)
    return {
        "difference to plain": found["difference"],
        "seeds better": found["better"],
        "p": found["p"],
        "exploratory": found["reading"],
        "on valid": found["on valid"],
        "to degree 1": contrast_cells(line.to_degree1, scale)["difference"],
        "one commit": found["one commit"],
    }


def _filters_and_costs(table: ResultTable) -> Grid:
    scale, rows = scale_of(table), []
    for line in table.lines:
        coefficients, seconds = line.coefficients, line.gpu_seconds
        cells = {
            "method": line.name,
            "valid": scale.number(line.valid),
            "added": span(line.added),
            "moved": NONE if line.moved is None else f"{line.moved:.2g}",
            "c0 c1 …": NONE,
            "sum": NONE,
        }
        if coefficients is not None:
            cells["c0 c1 …"] = " ".join(number(c, 3) for c in coefficients)
            cells["sum"] = number(sum(coefficients), 3)
        cells |= _costs_of_plain(line) if line is table.plain else _costs(line)
        cells["GPU seconds"] = NONE if seconds is None else f"{seconds:.3g}"
        rows.append(cells)
    return Grid(list(rows[0]), [list(row.values()) for row in rows], ("method",))


def _costs(line: Line) -> dict[str, str]:
    return {"time": ratio(line.times), "memory": ratio(line.memories)}


def _costs_of_plain(line: Line) -> dict[str, str]:
    """The absolute costs, which the ratios of the other lines refer to."""
    times, memories = 1000 * seconds_per_step(line.rows), peak_memory(line.rows)
    return {
        "time": f"{span(times, digits=3)} ms" if len(times) else NONE,
        "memory": f"{span(memories, digits=4)} MiB" if len(memories) else NONE,
    }


def _counterpart(table: ResultTable) -> Counterpart | None:
    return counterpart(table.recipe, table.task, [line.options for line in table.lines])


def commands_of(rows: pd.DataFrame) -> list[str]:
    """The commands of these runs; runs that differ only in their seed share a command."""
    seeds: dict[str, list[int]] = {}
    for row in rows.itertuples():
        if row.command:
            without = re.sub(rf"--seeds {row.seed}(?= |$)", _SEEDS, row.command)
            seeds.setdefault(without, []).append(row.seed)
    return [
        command.replace(_SEEDS, f"--seeds {','.join(map(str, sorted(set(found))))}")
        for command, found in seeds.items()
    ]
