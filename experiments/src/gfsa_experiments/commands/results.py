"""``gfsa results``: compare methods from the rows of runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import pandas as pd

    from gfsa_experiments.results.family_summary import Judged
    from gfsa_experiments.results.page_blocks import Block
    from gfsa_experiments.results.tables import ResultTable

PAGE = "README.md"
FAMILIES = "families.md"


def results(
    folder: Annotated[Path, typer.Option("--dir", help="The folder with the rows of runs.")] = Path(
        "results"
    ),
    recipe: Annotated[str, typer.Option(help="Only this recipe: glue, image …")] = "",
    task: Annotated[str, typer.Option(help="Only tasks whose name has this in it.")] = "",
    method: Annotated[
        str, typer.Option(help="Only these methods, separated by commas (and plain).")
    ] = "",
    contrast: Annotated[
        list[str] | None,
        typer.Option(help="'A - B': compare any two lines, seed by seed; repeat it."),
    ] = None,
    family: Annotated[str, typer.Option(help="Only families/NAME.toml.")] = "",
    plan: Annotated[
        Path | None, typer.Option(help="Write the family's runs here, for gfsa train --plan.")
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="Show the paper's own figures beside ours.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown, also in a terminal.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="Write every line of the tables here.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the forest plot: .png, .svg or .pdf.")
    ] = None,
    write: Annotated[
        bool,
        typer.Option("--write", help=f"Update {PAGE}, {FAMILIES} and RECIPE.md in the folder."),
    ] = False,
) -> None:
    """Compare methods over paired seeds: differences with intervals, verdicts, costs."""
    try:
        chosen = bool(recipe or task or method or contrast or family)
        if write:
            _refuse_to_write(folder, plot, chosen)
        if plan is not None and not family:
            raise ValueError("--plan writes the runs of a family; name it by --family")
        _refuse_places(plan, csv, plot)
        found = _read(folder)
        shown = _chosen(found, recipe, task, method)
        if plot is not None:
            from gfsa_experiments.results import figures

            figures.plot(shown, plot, found.judged)
            typer.echo(f"wrote {plot}", err=True)
        if csv is not None:
            from gfsa_experiments.results.export import write_csv

            write_csv(csv, shown, paper)
            typer.echo(f"wrote {csv}", err=True)
        if write:
            _write(folder, found, paper, plot)
        elif family:
            _print(_family(found, family, plan), markdown)
        elif contrast:
            _print(_contrasts(shown, contrast), markdown)
        else:
            _print(_page(found, shown, paper, chosen), markdown)
    except (ValueError, OSError) as error:
        typer.echo(f"gfsa results: {error}", err=True)
        raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        typer.echo(f"gfsa results needs {error.name}: pip install gfsa-experiments", err=True)
        raise typer.Exit(1) from error


def _refuse_to_write(folder: Path, plot: Path | None, chosen: bool) -> None:
    """Raise if ``--write`` could not make whole pages with a link to the figure."""
    if chosen:
        raise ValueError(
            "--write makes the whole pages; leave out --recipe, --task, --method, --contrast "
            "and --family"
        )
    if plot is not None and not plot.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"--write links to the figure, so --plot has to be a file in {folder}, got {plot}"
        )


def _refuse_places(*places: Path | None) -> None:
    """Raise for a file that cannot be written, before anything is read."""
    from gfsa_experiments.engine.whole_files import refuse_inside_file

    for place in filter(None, places):
        if place.is_dir():
            raise ValueError(f"{place} is a folder; name a file in it")
        refuse_inside_file(place)


@dataclass(frozen=True)
class _Folder:
    """What the rows of a folder say."""

    tables: list[ResultTable]
    """Exploratory; runs of families are not among them."""
    times: list[ResultTable]
    judged: list[Judged]
    tuning: pd.DataFrame
    """The rows by which arms were tuned."""


def _read(folder: Path) -> _Folder:
    from gfsa_experiments.results.families import (
        has_history,
        is_of,
        read_families,
        refuse_unregistered,
    )
    from gfsa_experiments.results.load_rows import read_folder, read_folder_if_any
    from gfsa_experiments.results.tables import make_tables
    from gfsa_experiments.results.verdicts import outcomes

    runs, families = read_folder(folder), read_families(folder)
    tuning = read_folder_if_any(folder / "tuning")
    refuse_unregistered(families, runs.every, tuning.every)
    keys = {key for family in families for key in family.keys}
    if is_of(runs.rows, keys).any() and not has_history(families[0].path):
        typer.echo(
            f"gfsa results: {folder} is not in a git repository with its whole history, so that "
            "families were committed before their runs cannot be checked here",
            err=True,
        )
    times = make_tables(read_folder_if_any(folder / "times"))
    judged = [(family, outcomes(family, runs.rows)) for family in families]
    tables = make_tables(runs.where(lambda rows: ~is_of(rows, keys)))
    return _Folder(tables, times, judged, tuning.rows)


def _page(found: _Folder, shown: list[ResultTable], paper: bool, part: bool) -> list[Block]:
    """The tables that are shown, after what the whole folder says unless a ``part`` is wanted."""
    from gfsa_experiments.results.overview import costs, overview
    from gfsa_experiments.results.page_blocks import Heading
    from gfsa_experiments.results.page_sections import sections

    head = [] if part else [*overview(found.tables, found.judged), *costs(found.times)]
    # a folder may have the runs of families alone
    return [*head, Heading("Tables"), *sections(shown, paper)] if shown else head


def _family(found: _Folder, name: str, plan: Path | None) -> list[Block]:
    from gfsa_experiments.results.family_details import family_section
    from gfsa_experiments.results.family_summary import family_blocks, is_complete
    from gfsa_experiments.results.page_blocks import Commands

    judged = {family.name: (family, outcomes) for family, outcomes in found.judged}
    if name not in judged:
        raise ValueError(f"there is no family {name!r}; there are {', '.join(judged) or 'none'}")
    family, outcomes = judged[name]
    if plan is not None:
        plan.write_text("\n".join([f"# {family.title}", *family.plan, ""]), encoding="utf-8")
        typer.echo(f"wrote {plan}: {len(family.keys)} runs", err=True)
    if is_complete(outcomes):
        return family_section(family, outcomes)
    commands = [f"gfsa train {arguments}" for arguments in family.plan]
    return [*family_blocks(family, outcomes), Commands(commands)]


def _contrasts(shown: list[ResultTable], texts: list[str]) -> list[Block]:
    from gfsa_experiments.results.line_pairs import contrast_grid
    from gfsa_experiments.results.page_blocks import Text

    return [Text("Exploratory, not corrected for their number:"), contrast_grid(shown, texts)]


def _print(blocks: list[Block], markdown: bool) -> None:
    from rich.console import Console

    from gfsa_experiments.results.page_blocks import show, to_markdown

    if markdown or not sys.stdout.isatty():
        typer.echo(to_markdown(blocks), nl=False)
    else:
        show(blocks, Console())


def _write(folder: Path, found: _Folder, paper: bool, plot: Path | None) -> None:
    """Update the first page, that of families and one per recipe, all of them or none."""
    from gfsa_experiments.results.family_details import families_page
    from gfsa_experiments.results.family_summary import of_recipe
    from gfsa_experiments.results.overview import costs, domain_of, overview
    from gfsa_experiments.results.page_blocks import Picture, Text, updated_page, write_pages
    from gfsa_experiments.results.page_sections import sections
    from gfsa_experiments.results.tuning_table import tuning_blocks

    command = "gfsa results --write"
    if folder != Path("results"):
        command += f" --dir {folder}"
    command += " --paper" if paper else ""
    command += f" --plot {plot}" if plot is not None else ""
    source = Text(f"Made by `{command}` from the rows in this folder; edit outside the two marks.")
    by_recipe = {r: list(own) for r, own in groupby(found.tables, key=lambda t: t.recipe)}
    head: list[Block] = []
    if plot is not None:
        place = Path(os.path.relpath(plot, folder)).as_posix()
        head = [Picture(place, "Relative error reduction by domain, with 95 % intervals")]
    titles = {recipe: domain_of(recipe, tables) for recipe, tables in by_recipe.items()}
    links = ", ".join(f"[{title}]({recipe}.md)" for recipe, title in titles.items())
    pointer = f"Families line by line and seed by seed: [{FAMILIES}]({FAMILIES}). "
    pointer = pointer if found.judged else ""
    pointer += f"Tables, commands, figures of the paper: {links}. " if links else ""
    foot = Text(f"{pointer}{source.text}")
    first = [*head, *overview(found.tables, found.judged), *costs(found.times), foot]
    pages = {folder / PAGE: updated_page(folder / PAGE, "Results", first)}
    if found.judged:
        path = folder / FAMILIES
        blocks = [source, *families_page(found.judged)]
        pages[path] = updated_page(path, "Confirmatory families", blocks)
    for recipe, tables in by_recipe.items():
        path, title = folder / f"{recipe}.md", titles[recipe]
        tuned = tuning_blocks(found.tuning[found.tuning.recipe == recipe])
        blocks = [source, *of_recipe(found.judged, recipe), *tuned, *sections(tables, paper)]
        pages[path] = updated_page(path, title[0].upper() + title[1:], blocks)
    write_pages(pages)
    typer.echo(f"wrote {', '.join(map(str, pages))}", err=True)


def _chosen(found: _Folder, recipe: str, task: str, method: str) -> list[ResultTable]:
    """The tables and lines that were asked for; a ValueError names one that does not exist."""
    tables = _of_task(found, _of_recipe(found, recipe), recipe, task)
    methods = {name.strip() for name in method.split(",") if name.strip()}
    return _of_methods(tables, methods) if methods else tables


def _of_recipe(found: _Folder, recipe: str) -> list[ResultTable]:
    """The tables of a recipe; all of them without one."""
    recipes = sorted({table.recipe for table in found.tables})
    if recipe and recipe not in recipes:
        raise ValueError(
            f"no exploratory run of recipe {recipe!r}; there are {', '.join(recipes) or 'none'}"
            + _families_with(found, lambda own, _: own == recipe)
        )
    return [table for table in found.tables if recipe in ("", table.recipe)]


def _of_task(
    found: _Folder, tables: list[ResultTable], recipe: str, task: str
) -> list[ResultTable]:
    """Those tables of a recipe whose task has this in its name."""
    kept = [table for table in tables if task in table.task]
    if task and not kept:
        tasks = sorted({table.task for table in tables})
        raise ValueError(
            f"no task with {task!r} in its name; there are {', '.join(tasks) or 'none'}"
            + _families_with(found, lambda own, name: recipe in ("", own) and task in name)
        )
    return kept


def _of_methods(tables: list[ResultTable], wanted: set[str]) -> list[ResultTable]:
    """The tables that have a line of these methods, with those lines and the plain ones."""
    methods = {line.method for table in tables for line in table.lines}
    if wanted - methods:
        raise ValueError(
            f"no run of method {', '.join(sorted(wanted - methods))}; "
            f"there are {', '.join(sorted(methods))}"
        )
    kept = wanted | {"plain"}
    return [
        replace(
            table,
            lines=tuple(line for line in table.lines if line.method in kept),
            replaced=table.replaced[table.replaced.method.isin(list(kept))],
        )
        for table in tables
        if any(line.method in wanted for line in table.lines)
    ]


def _families_with(found: _Folder, has: Callable[[str, str], bool]) -> str:
    """Which families have runs of a recipe and task, for a message; empty if none has."""
    names = [
        family.name
        for family, _ in found.judged
        if any(has(*task) for comparison in family.comparisons for task in comparison.tasks)
    ]
    return f". Runs of families are shown by --family: {', '.join(names)}" if names else ""
