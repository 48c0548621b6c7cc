"""The sections of the page: a summary, the tables by recipe, and how to read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

import pandas as pd

from gfsa_experiments.results.notes import footnotes, notes_of
from gfsa_experiments.results.number_format import (
    NONE,
    Scale,
    amount,
    count,
    number,
    p_value,
    ratio,
    scale_of,
    span,
)
from gfsa_experiments.results.page_blocks import Block, Bullets, Commands, Grid, Heading, Text
from gfsa_experiments.results.paper import SOURCE, Counterpart, counterpart
from gfsa_experiments.results.paper_sections import paper_blocks, paper_difference
from gfsa_experiments.results.summary import summary, titles
from gfsa_experiments.results.tables import Line, ResultTable, peak_memory, seconds_per_step

_SEEDS = "--seeds …"


def page(shown: Sequence[ResultTable], every: list[ResultTable], paper: bool) -> list[Block]:
    """The blocks of the page.

    Args:
        shown: the tables that are shown.
        every: the tables of the whole folder, for the statistics of all comparisons.
        paper: show the paper's figures beside ours.
    """
    blocks: list[Block] = [Heading("Summary"), summary(shown, paper)]
    names = titles(shown)
    for recipe, tables in groupby(zip(shown, names, strict=True), key=lambda pair: pair[0].recipe):
        blocks.append(Heading(recipe))
        for table, title in tables:
            blocks.extend(section(table, title, paper))
    blocks += [Heading("How to read the tables"), Bullets(footnotes(every))]
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
        Heading(title, 3),
        Text(describe(table)),
        _grid(table, match),
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
    percent = " in percent" if scale_of(table).factor == 100 else ""
    better = "higher" if table.higher_is_better else "lower"
    rows = table.rows
    parts = [f"{table.metric}{percent} on the test split, {better} is better"]
    if len(rows):
        parts.append(f"{count(rows.parameters.median())} parameters")
        parts.append(amount(rows.epochs, "epoch"))
        parts.append(amount(rows.steps, "step"))
    parts += sorted(set(rows.device) - {""}) + sorted(set(rows.precision) - {""})
    settings = f"`{table.settings}`, others" if table.settings else "all"
    return f"{', '.join(parts)}. Settings: {settings} by default."


def _grid(table: ResultTable, match: Counterpart | None) -> Grid:
    scale = scale_of(table)
    has_valid = any(line.valid is not None for line in table.lines)
    rows = []
    for line in table.lines:
        spread = "" if line.std is None else f" ± {scale.number(line.std)}"
        cells = {
            "method": line.name,
            "seeds": str(len(line.rows)),
            table.metric: scale.number(line.mean) + spread,
        }
        if has_valid:
            cells["valid"] = scale.number(line.valid)
        cells |= _difference(line, scale)
        cells |= _filter(line)
        cells |= _costs_of_plain(line) if line is table.plain else _costs(line)
        if match is not None:
            cells["paper"] = paper_difference(match, line.method, line.options)
        rows.append(cells)
    return Grid(list(rows[0]), [list(row.values()) for row in rows], ("method", "verdict"))


def _difference(line: Line, scale: Scale) -> dict[str, str]:
    found = line.difference
    return {
        "difference to plain": NONE if found is None else scale.difference(found),
        "seeds better": NONE if found is None else f"{found.seeds_better}/{len(found.seeds)}",
        "p (Holm)": p_value(line.adjusted_p),
        "verdict": (found and found.verdict) or NONE,
    }


def _filter(line: Line) -> dict[str, str]:
    coefficients = line.coefficients
    return {
        "added": span(line.added),
        "moved": NONE if line.moved is None else f"{line.moved:.2g}",
        "c0 c1 …": NONE if coefficients is None else " ".join(number(c, 3) for c in coefficients),
    }


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
