"""What the whole folder says: what is confirmed, a row per domain, and what filters cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pandas as pd

from gfsa_experiments.results.contrasts import Contrast, pooled_reduction
from gfsa_experiments.results.family_summary import Judged, all_families
from gfsa_experiments.results.number_format import percent, ratio, span
from gfsa_experiments.results.page_blocks import Block, Bullets, Grid, Heading, Text
from gfsa_experiments.results.statistics import LEVEL
from gfsa_experiments.results.tables import DEGREE_1, Line, ResultTable, coefficients_of, learns_c0

DOMAINS = {
    "pretrain": "pretraining",
    "causal_lm": "language modelling",
    "image": "images",
    "graph": "graphs",
    "speech": "speech",
    "lra": "long sequences",
    "code": "code",
    "glue": "GLUE, fine-tuned",
    "digits": "digits",
}
# what its data sets are about, where one recipe has several
_OF_DATA = {"bigclonebench": "code clones", "devign": "code defects"}
FILTERS = {DEGREE_1: "degree 1", "gfsa": "GFSA"}
# where a method ran with several options, the first page shows this choice, whatever its outcome
OWN_RATE = "filter_lr=0.01"
_FROM_SCRATCH = ("pretrain", "image", "graph", "speech", "lra", "stdlib", "digits")


@dataclass(frozen=True)
class Domain:
    """The tables of one recipe; each task counts the same, and none is chosen."""

    name: str
    to_plain: dict[str, list[Contrast]]
    """By method, one contrast per table."""
    second_pass: list[Contrast]
    """GFSA to degree 1."""


def domain_of(recipe: str, tables: Sequence[ResultTable]) -> str:
    """What the tables of a recipe are about: ``images``; of code, what its only data set is about.

    Own code goes by its name, ``code (my)``: whether it has clones or defects, the caller knows.
    """
    general = DOMAINS.get(recipe, recipe)
    data = {table.task.split()[0] for table in tables}
    if recipe != "code" or len(data) != 1:
        return general
    (name,) = data
    return _OF_DATA.get(name, f"{general} ({name.removeprefix('data=')})")


def domains(tables: Sequence[ResultTable]) -> list[Domain]:
    """Every domain in which a filter (without filters: any method) can be compared with plain."""
    every = dict.fromkeys(line.method for table in tables for line in table.lines)
    methods = [name for name in FILTERS if name in every] or [n for n in every if n != "plain"]
    order = list(DOMAINS)
    by_recipe = {recipe: list(own) for recipe, own in groupby(tables, key=lambda t: t.recipe)}
    recipes = sorted(by_recipe, key=lambda r: (order.index(r) if r in order else len(order), r))
    found = [_domain(recipe, by_recipe[recipe], methods) for recipe in recipes]
    return [domain for domain in found if any(domain.to_plain.values())]


def _domain(recipe: str, tables: Sequence[ResultTable], methods: Sequence[str]) -> Domain:
    """The tables of one recipe, with the contrasts of these methods."""
    lines = {
        name: [line for table in tables if (line := headline(table, name)) is not None]
        for name in methods
    }
    to_plain = {
        name: [line.to_plain for line in own if line.to_plain is not None]
        for name, own in lines.items()
    }
    second = [line.to_degree1 for line in lines.get("gfsa", []) if line.to_degree1]
    return Domain(domain_of(recipe, tables), to_plain, second)


def headline(table: ResultTable, method: str) -> Line | None:
    """A method's only line; of several that with :data:`OWN_RATE`, never the best."""
    lines = [line for line in table.lines if line.method == method]
    return next((line for line in lines if len(lines) == 1 or line.options == OWN_RATE), None)


def confirmed(judged: Sequence[Judged]) -> list[Block]:
    """The comparisons of the families."""
    return [Heading("Confirmatory comparisons"), *all_families(judged)]


def explored(every: Sequence[ResultTable]) -> list[Block]:
    """A row per domain, and what is regular; ``every`` has the tables of the whole folder."""
    blocks: list[Block] = []
    found = domains(every)
    if found:
        methods = [FILTERS.get(name, name) for name in found[0].to_plain]
        columns = ["domain", "tasks", "pairs", *methods, "GFSA to degree 1"]
        rows = [_domain_cells(domain) for domain in found]
        text = (
            "Relative reduction of the error compared with plain, 95 % interval, mean over the "
            "tasks of the domain; positive is better. Not corrected for the number of comparisons: "
            "an interval that excludes 0 is *suggestive* and no more."
        )
        blocks = [Heading("Exploratory, by domain"), Text(text), Grid(columns, rows, ("domain",))]
    notes = [*_coefficient_note(every), *_chance_note(every)]
    return [*blocks, Bullets(notes)] if notes else blocks


def _domain_cells(domain: Domain) -> list[str]:
    compared = [*domain.to_plain.values(), domain.second_pass]
    pairs = [len(contrast.test.seeds) for contrasts in compared for contrast in contrasts]
    cells = [domain.name, span(len(contrasts) for contrasts in compared if contrasts), span(pairs)]
    for contrasts in compared:
        found = pooled_reduction(contrasts)
        word = ", suggestive" if found is not None and found.excludes_zero else ""
        cells.append(percent(found) + word)
    return cells


def _coefficient_note(tables: Sequence[ResultTable]) -> list[str]:
    rows = [row for table in tables for row in table.rows.itertuples() if learns_c0(row)]
    scratch = [coefficients_of(row)[0] for row in rows if _from_scratch(row)]
    tuned = [coefficients_of(row)[0] for row in rows if not _from_scratch(row)]
    notes = []
    if scratch:
        negative = sum(c0 < 0 for c0 in scratch)
        note = (
            f"The mean of c0 is negative in {negative} of {len(scratch)} runs that learned it from "
            "scratch"
        )
        if negative == len(scratch):
            note += ": what a token gathers has some of the token itself taken out"
        notes.append(f"{note}.")
    if tuned:
        low, high = pd.Series(tuned).quantile([0.05, 0.95])
        notes.append(
            f"In nine of ten of {len(tuned)} fine-tuned runs the mean of c0 is from {low:.2f} to "
            f"{high:.2f}.".replace("-", "−").replace("fine−", "fine-")
        )
    return notes


def _from_scratch(row: Any) -> bool:
    return row.recipe in _FROM_SCRATCH or "model=scratch" in row.command


def _chance_note(tables: Sequence[ResultTable]) -> list[str]:
    lines = [line for table in tables for line in table.lines]
    readings = [line.difference.reading for line in lines if line.difference is not None]
    known = [reading for reading in readings if reading is not None]
    # of one comparison there is nothing to correct
    if len(known) < 2:
        return []
    excluding = sum(reading != "not shown" for reading in known)
    kept = sum(line.adjusted_p is not None and line.adjusted_p < 1 - LEVEL for line in lines)
    return [
        f"The folder has {len(known)} exploratory comparisons with plain, of which {excluding} "
        f"exclude 0; if no method did anything, about {(1 - LEVEL) * len(known):.1f} would by "
        f"chance. Holm's correction over all of them leaves {kept}."
    ]


def costs(times: Sequence[ResultTable]) -> list[Block]:
    """The time of a training step and its memory, from runs that had the machine to themselves."""
    said = []
    for recipe, tables in groupby(times, key=lambda table: table.recipe):
        own = list(tables)
        parts = []
        for method, name in FILTERS.items():
            lines = [line for table in own for line in table.lines if line.method == method]
            taken = [time for line in lines for time in line.times]
            memory = [memory for line in lines for memory in line.memories]
            if taken:
                beside = f" ({ratio(memory)})" if memory else ""
                parts.append(f"{name} {ratio(taken)}{beside}")
        if parts:
            said.append(f"{domain_of(recipe, own)}: {', '.join(parts)}")
    if not said:
        return []
    text = (
        "Time of a training step (and memory where it was measured), relative to plain, alone on "
        f"the GPU, rows in [times](times). {'; '.join(said)}."
    )
    # a paragraph: the page has one line for each, and families need theirs
    return [Heading("What it costs"), Text(text)]
