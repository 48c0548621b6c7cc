"""``gfsa results``: compare methods from the rows of runs."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gfsa_experiments.results.page_blocks import Block
    from gfsa_experiments.results.tables import ResultTable

PAGE = "README.md"


def results(
    folder: Annotated[Path, typer.Option("--dir", help="The folder with the rows of runs.")] = Path(
        "results"
    ),
    recipe: Annotated[str, typer.Option(help="Only this recipe: glue, image …")] = "",
    task: Annotated[str, typer.Option(help="Only tasks whose name has this in it.")] = "",
    method: Annotated[
        str, typer.Option(help="Only these methods, separated by commas (and plain).")
    ] = "",
    paper: Annotated[
        bool, typer.Option("--paper", help="Show the paper's own figures beside ours.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown, also in a terminal.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="Write every line of the tables here.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the differences: .png, .svg or .pdf.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help=f"Update the generated part of {PAGE} in the folder.")
    ] = False,
) -> None:
    """Compare methods over paired seeds: means, differences with intervals, verdicts, costs."""
    try:
        if write and (recipe or task or method):
            raise ValueError("--write makes the whole page; leave out --recipe, --task, --method")
        _results(folder, (recipe, task, method), paper, markdown, csv, plot, write)
    except (ValueError, OSError) as error:
        typer.echo(f"gfsa results: {error}", err=True)
        raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        typer.echo(f"gfsa results needs {error.name}: pip install gfsa-experiments", err=True)
        raise typer.Exit(1) from error


def _results(
    folder: Path,
    filters: tuple[str, str, str],
    paper: bool,
    markdown: bool,
    csv: Path | None,
    plot: Path | None,
    write: bool,
) -> None:
    from rich.console import Console

    from gfsa_experiments.results import figures
    from gfsa_experiments.results.export import write_csv
    from gfsa_experiments.results.load_rows import read_folder
    from gfsa_experiments.results.page_blocks import show, to_markdown, update_page
    from gfsa_experiments.results.page_sections import page
    from gfsa_experiments.results.tables import make_tables

    if write and plot is not None and not plot.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"--write links to the figure, so --plot has to be a file in {folder}, got {plot}"
        )
    every = make_tables(read_folder(folder))
    shown = _chosen(every, *filters)
    blocks = page(shown, every, paper)
    if plot is not None:
        figures.plot(shown, plot)
        typer.echo(f"wrote {plot}", err=True)
    if csv is not None:
        write_csv(csv, shown, paper)
        typer.echo(f"wrote {csv}", err=True)
    if write:
        update_page(folder / PAGE, to_markdown(_committed(blocks, folder, paper, plot)))
        typer.echo(f"wrote {folder / PAGE}", err=True)
    elif markdown or not sys.stdout.isatty():
        typer.echo(to_markdown(blocks), nl=False)
    else:
        show(blocks, Console())


def _chosen(tables: list[ResultTable], recipe: str, task: str, method: str) -> list[ResultTable]:
    """The tables and lines that were asked for; a ValueError names one that does not exist."""
    recipes = sorted({table.recipe for table in tables})
    if recipe and recipe not in recipes:
        raise ValueError(f"no run of recipe {recipe!r}; there are {', '.join(recipes)}")
    tables = [table for table in tables if recipe in ("", table.recipe)]
    tasks = sorted({table.task for table in tables})
    tables = [table for table in tables if task in table.task]
    if not tables:
        raise ValueError(f"no task with {task!r} in its name; there are {', '.join(tasks)}")
    wanted = {name.strip() for name in method.split(",") if name.strip()}
    if not wanted:
        return tables
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


def _committed(blocks: list[Block], folder: Path, paper: bool, plot: Path | None) -> list[Block]:
    """The page with the command that makes it, and the figure if there is one."""
    from gfsa_experiments.results.page_blocks import Picture, Text

    command = "gfsa results --write"
    if folder != Path("results"):
        command += f" --dir {folder}"
    if paper:
        command += " --paper"
    if plot is None:
        head: list[Block] = []
    else:
        command += f" --plot {plot}"
        place = Path(os.path.relpath(plot, folder)).as_posix()
        head = [Picture(place, "Differences to plain with 95 % intervals")]
    source = Text(f"Made by `{command}` from the rows in this folder; edit outside the two marks.")
    return [source, *blocks[:2], *head, *blocks[2:]]
