"""``gfsa results``: compare methods from the rows of runs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
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
EXPLORED = "exploratory.md"


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
        typer.Option(help="'A - B': compare any two lines, also of --family; repeat it."),
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
        typer.Option("--write", help=f"Update {PAGE}, {FAMILIES}, {EXPLORED}, RECIPE.md there."),
    ] = False,
) -> None:
    """Compare methods over paired seeds: differences with intervals, verdicts, costs."""
    try:
        chosen = bool(recipe or task or method or contrast or family)
        if write:
            _refuse_to_write(folder, plot, chosen)
        _refuse_places(plan, csv, plot)
        _refuse_together(family, plan, contrast, method, bool(recipe or task))
        found = _read(folder)
        shown = _shown(found, recipe, task, method, bool(contrast))
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
        elif contrast:
            _print(_contrasts(found, contrast, family, recipe, task), markdown)
        elif family:
            _print(_family(found, family, plan), markdown)
        else:
            _print(_page(found, shown, paper, chosen), markdown)
    except (ValueError, OSError) as error:
        typer.echo(f"gfsa results: {error}", err=True)
        raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        typer.echo(
            f"gfsa results needs {error.name}. In a checkout of gfsa: pip install ./experiments",
            err=True,
        )
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


def _refuse_together(
    family: str, plan: Path | None, contrast: list[str] | None, method: str, part: bool
) -> None:
    """Raise for options of which one would be ignored; ``part``: a recipe or task is asked for."""
    if plan is not None and not family:
        raise ValueError("--plan writes the runs of a family; name it by --family")
    if plan is not None and contrast:
        raise ValueError("--plan writes runs and --contrast compares them; leave one out")
    if family and (part or method):
        raise ValueError("--family shows one family; leave out --recipe, --task and --method")
    if contrast and method:
        raise ValueError("--contrast names its two lines; leave out --method")


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

    families = read_families(folder)
    # a family is there before its first run, and --plan writes what to run
    runs = read_folder_if_any(folder) if families else read_folder(folder)
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


def _shown(
    found: _Folder, recipe: str, task: str, method: str, or_families: bool
) -> list[ResultTable]:
    """The exploratory tables that were asked for; ``or_families``: families may have all runs."""
    from gfsa_experiments.results.choice import chosen_tables, families_of, tables_of

    if or_families and families_of(found.judged, recipe, task):
        return tables_of(found.tables, recipe, task)
    return chosen_tables(found.tables, found.judged, recipe, task, method)


def _page(found: _Folder, shown: list[ResultTable], paper: bool, part: bool) -> list[Block]:
    """The tables that are shown, after what the whole folder says unless a ``part`` is wanted."""
    from gfsa_experiments.results.overview import confirmed, costs, explored
    from gfsa_experiments.results.page_blocks import Heading
    from gfsa_experiments.results.page_sections import sections

    head: list[Block] = []
    if not part:
        head = [*confirmed(found.judged), *explored(found.tables), *costs(found.times)]
    # a folder may have the runs of families alone
    return [*head, Heading("Tables"), *sections(shown, paper)] if shown else head


def _family(found: _Folder, name: str, plan: Path | None) -> list[Block]:
    from gfsa_experiments.results.choice import family_named
    from gfsa_experiments.results.family_details import family_section
    from gfsa_experiments.results.family_summary import family_blocks, is_complete
    from gfsa_experiments.results.page_blocks import Commands

    family, outcomes = family_named(found.judged, name)
    if plan is not None and family.withdrawn:
        raise ValueError(f"the family {name} is withdrawn: {family.withdrawn}")
    if plan is not None:
        plan.write_text("\n".join([f"# {family.title}", *family.plan, ""]), encoding="utf-8")
        typer.echo(f"wrote {plan}: {len(family.keys)} runs", err=True)
    if is_complete(outcomes):
        return family_section(family, outcomes)
    if family.withdrawn:
        return family_blocks(family, outcomes)
    commands = [f"gfsa train {arguments}" for arguments in family.plan]
    return [*family_blocks(family, outcomes), Commands(commands)]


def _contrasts(
    found: _Folder, texts: list[str], family: str, recipe: str, task: str
) -> list[Block]:
    """Of one family; without it, of the tables and families of a recipe and task."""
    from gfsa_experiments.results.choice import families_of, family_named, tables_of
    from gfsa_experiments.results.contrast_blocks import contrast_blocks, family_contrast_blocks

    if family:
        return family_contrast_blocks(family_named(found.judged, family), texts)
    tables, judged = tables_of(found.tables, recipe, task), families_of(found.judged, recipe, task)
    return contrast_blocks(tables, judged, texts)


def _print(blocks: list[Block], markdown: bool) -> None:
    from rich.console import Console

    from gfsa_experiments.results.page_blocks import show, to_markdown

    if markdown or not sys.stdout.isatty():
        typer.echo(to_markdown(blocks), nl=False)
    else:
        show(blocks, Console())


def _write(folder: Path, found: _Folder, paper: bool, plot: Path | None) -> None:
    """Update the first page, those of families and domains and one per recipe, all or none."""
    from gfsa_experiments.results.family_details import families_page
    from gfsa_experiments.results.family_summary import of_recipe
    from gfsa_experiments.results.overview import confirmed, costs, domain_of, explored
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
    pointer += f"Exploratory comparisons by domain: [{EXPLORED}]({EXPLORED}). " if links else ""
    pointer += f"Tables, commands, figures of the paper: {links}. " if links else ""
    foot = Text(f"{pointer}{source.text}")
    first = [*head, *confirmed(found.judged), *costs(found.times), foot]
    pages = {folder / PAGE: updated_page(folder / PAGE, "Results", first)}
    if found.judged:
        path = folder / FAMILIES
        blocks = [source, *families_page(found.judged)]
        pages[path] = updated_page(path, "Confirmatory families", blocks)
    if found.tables:
        path = folder / EXPLORED
        pages[path] = updated_page(
            path, "Exploratory comparisons", [source, *explored(found.tables)]
        )
    for recipe, tables in by_recipe.items():
        path, title = folder / f"{recipe}.md", titles[recipe]
        tuned = tuning_blocks(found.tuning[found.tuning.recipe == recipe])
        blocks = [source, *of_recipe(found.judged, recipe), *tuned, *sections(tables, paper)]
        pages[path] = updated_page(path, title[0].upper() + title[1:], blocks)
    write_pages(pages)
    typer.echo(f"wrote {', '.join(map(str, pages))}", err=True)
