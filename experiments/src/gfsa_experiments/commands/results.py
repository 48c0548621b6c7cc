"""``gfsa results``: compare methods from the rows of runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer


def results(
    folder: Annotated[Path, typer.Option("--dir", help="The folder with the rows of runs.")] = Path(
        "results"
    ),
    show: Annotated[
        str,
        typer.Option(
            help="Only verdicts, tables, overall, tuning, forest, scores; or speed, of the suite "
            "--recipe, timed as --task says."
        ),
    ] = "",
    recipe: Annotated[str, typer.Option(help="Only this recipe: glue, image …")] = "",
    task: Annotated[str, typer.Option(help="Only tasks whose name has this in it.")] = "",
    method: Annotated[
        str, typer.Option(help="Only these methods or lines, separated by commas (and plain).")
    ] = "",
    against: Annotated[
        str, typer.Option(help="Compare with this method or line instead of plain.")
    ] = "",
    family: Annotated[str, typer.Option(help="Only families/NAME.toml; several by commas.")] = "",
    plan: Annotated[
        Path | None, typer.Option(help="Write the family's runs here, for gfsa train --plan.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the forest plot: .png, .svg or .pdf.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Update the marked parts of the folder's pages.")
    ] = False,
) -> None:
    """Compare methods over paired seeds: differences with intervals, and verdicts.

    Example: gfsa results --recipe text --method gfsa,degree1
    """
    from gfsa_experiments.engine.whole_files import refuse_inside_file
    from gfsa_experiments.results.pages import Asked, Folder, blocks_of, write_folder, write_plan
    from gfsa_experiments.results.report import plot as plot_forest

    try:
        asked = Asked(show, recipe, task, method, against, family)
        asked.check()
        if write and asked != Asked():
            raise ValueError("--write makes whole pages; leave out every option but --dir")
        if plan is not None and not family:
            raise ValueError("--plan writes the runs of a family; name it by --family")
        for place in filter(None, (plan, plot)):
            refuse_inside_file(place)
        found = Folder(folder)
        if plan is not None:
            typer.echo(f"wrote {plan}: {write_plan(found, family, plan)} runs", err=True)
        if plot is not None:
            plot_forest(found.chosen(asked), plot, found.judged)
            typer.echo(f"wrote {plot}", err=True)
        if write:
            typer.echo(f"wrote {', '.join(map(str, write_folder(found)))}", err=True)
        else:
            _print("\n\n".join(blocks_of(found, asked)) + "\n")
    except (ValueError, OSError) as error:
        typer.echo(f"gfsa results: {error}", err=True)
        raise typer.Exit(1) from error


def _print(markdown: str) -> None:
    if not sys.stdout.isatty():
        typer.echo(markdown, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(re.sub(r"!\[.*?\]\(.*?\)", "", markdown)))
