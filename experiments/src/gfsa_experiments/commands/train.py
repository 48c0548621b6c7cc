"""``gfsa train``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from gfsa_experiments.runs.run import Run


def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="glue, causal_lm, code, image, graph …")] = "",
    method: Annotated[str, typer.Option(help="plain, gfsa, gfsa-even …, by commas.")] = "plain",
    K: Annotated[str, typer.Option("--K", help="Order of the filter: 3, or 2-10 for all.")] = "",
    seeds: Annotated[str, typer.Option(help="0,1,2 or 0-4.")] = "0",
    data_dir: Annotated[Path, typer.Option(envvar="GFSA_DATA", help="Where data sets lie.")] = Path(
        "data"
    ),
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, any setting; repeat it.")
    ] = None,
    each: Annotated[
        list[str] | None,
        typer.Option("--each", help="key=a,b,c: run with each of these values; repeat it."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A file with arguments of `gfsa train` on each line.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
    results: Annotated[Path, typer.Option(help="Where rows are added.")] = Path("results"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what was interrupted.")
    ] = False,
    missing: Annotated[
        bool, typer.Option("--missing", help="Only runs that the results lack.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Show recipes and methods.")] = False,
) -> None:
    """Train with and without a graph filter, and write down what came out."""
    from rich.console import Console

    try:
        import accelerate  # noqa: F401
    except ModuleNotFoundError as error:
        raise typer.BadParameter(
            f"gfsa train needs {error.name}: pip install gfsa-experiments"
        ) from error

    # launchers tell each process its place; asking torch would take a GPU for this one
    rank = int(os.environ.get("RANK", 0))
    console = Console(quiet=rank > 0)
    # recipes of one's own lie where one stands, as for python -m
    sys.path.append(os.getcwd())
    if show:
        _show(console)
        return
    from gfsa_experiments.runs.row import check_rows_fit
    from gfsa_experiments.runs.sweep import (
        Request,
        lacking,
        names_of,
        numbers_of,
        runs_of_plan,
        setting_of,
    )

    if bool(recipe) == (plan is not None):
        raise typer.BadParameter("name a recipe (gfsa train --list shows them), or give a --plan")
    if plan is not None:
        _refuse_beside_a_plan(context)
    places: dict[str, Any] = {
        "data_dir": data_dir,
        "out": out,
        "device": device,
        "resume": resume,
        "jobs": jobs,
    }
    runs: list[Run] = []
    try:
        if plan is not None:
            runs = runs_of_plan(plan, **places)
            # whatever time cuts off, the seeds that are there are there for every method
            runs.sort(key=lambda run: run.config.seed)
        else:
            request = Request(
                recipe,
                methods=names_of(method),
                orders=numbers_of("--K", K) if K else (),
                seeds=numbers_of("--seeds", seeds),
                settings=tuple(setting_of(text) for text in setting or []),
                each=tuple(setting_of(text) for text in each or []),
            )
            runs = request.runs(**places)
        runs = list({run.folder: run for run in runs}.values())
        for name in {run.key().recipe for run in runs}:
            check_rows_fit(results / f"{name}.csv")
        # reads every row: a damaged table is found now, not when there is a row to add
        lacked = lacking(runs, results)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if missing:
        runs = lacked
        if not runs:
            console.print(f"{results} has all of these runs")
            return
    _print_config(console, runs[0])
    runs = _told_of_other_data(runs, results)
    failed = _carry_out(console, runs, jobs, results, write=rank == 0)
    if failed:
        raise typer.Exit(1)


def _told_of_other_data(runs: list[Run], results: Path) -> list[Run]:
    """One run of each experiment looks whether there are rows on other data: once is enough."""
    import dataclasses

    first: dict[tuple[str, str, str], Run] = {}
    for run in runs:
        if not (run.resume and (run.folder / "row.json").exists()):
            key = run.key()
            first.setdefault((key.recipe, key.task, key.settings), run)
    looking = {run.folder for run in first.values()}
    return [
        dataclasses.replace(run, results=results if run.folder in looking else None) for run in runs
    ]


def _refuse_beside_a_plan(context: typer.Context) -> None:
    flags = {"method": "--method", "K": "--K", "seeds": "--seeds", "setting": "--set"}
    given = [
        flag
        for name, flag in (flags | {"each": "--each"}).items()
        if (source := context.get_parameter_source(name)) and source.name != "DEFAULT"
    ]
    if given:
        raise typer.BadParameter(
            f"{', '.join(given)} would change nothing beside --plan, whose lines say it all; "
            "write it into the plan (a line that begins with common is for all below)"
        )


def _carry_out(console: Console, runs: list[Run], jobs: int, results: Path, write: bool) -> int:
    """Run everything, add each row as it comes, and give the number of runs that failed."""
    from gfsa_experiments.engine.progress import many, one_at_a_time
    from gfsa_experiments.runs.row import append_rows, has_row
    from gfsa_experiments.runs.run_many import carry_out_all

    done = {run.folder for run in runs if run.resume and (run.folder / "row.json").exists()}
    if jobs > 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise typer.BadParameter("--jobs is for one process; accelerate launch has started several")
    failed, names = 0, _names(runs)
    with (one_at_a_time if jobs == 1 else many)(console, len(runs)) as (progress, advance):
        for finished in carry_out_all(runs, jobs, progress):
            run, row, error = finished.run, finished.row, finished.error
            if row is not None and write:
                try:
                    # of several rows of one run the latest counts; one that was finished before
                    # has its row here, unless that did not get here for whatever reason
                    table = results / f"{row.recipe}.csv"
                    if run.folder not in done or not has_row(table, row):
                        append_rows(table, [row])
                except (ValueError, OSError) as reason:
                    # nor does it take the others along
                    kept = f"its row is in {run.folder / 'row.json'}, --resume adds it: {reason}"
                    error = f"{error}; {kept}" if error else kept
            if row is None or error:
                failed += 1
                told = f"failed: {names[run.folder]}: {error}"
                console.print(told, style="red", markup=False)
            else:
                was_there = "was there: " if run.folder in done else ""
                told = f"{was_there}{names[run.folder]}: {row.metric} {row.test:.4f}"
                console.print(told, highlight=False, markup=False)
            advance()
    console.print(f"{len(runs) - failed} of {len(runs)} runs done; gfsa results shows the tables")
    return failed


def _names(runs: list[Run]) -> dict[Path, str]:
    """What each run is called: itself, and the settings that not all of them have."""
    settings = {run.folder: run.key().settings.split() for run in runs}
    shared = set.intersection(*map(set, settings.values()))
    own = {
        folder: " ".join(word for word in words if word not in shared)
        for folder, words in settings.items()
    }
    return {run.folder: f"{run} {own[run.folder]}".rstrip() for run in runs}


def _print_config(console: Console, run: Run) -> None:
    import dataclasses

    from rich.table import Table

    table = Table(title=f"{run} (settings of the first run)", show_header=False)
    for part in (run.config, run.options):
        for name, value in dataclasses.asdict(part).items():
            table.add_row(name, str(value))
    console.print(table)


def _show(console: Console) -> None:
    from rich.table import Table

    from gfsa_experiments.engine.methods import METHODS
    from gfsa_experiments.tasks import RECIPES, find_recipe

    table = Table(title="Recipes", show_lines=True)
    for column in ("recipe", "what it trains", "data", "looked for under --data-dir", "from"):
        table.add_column(column)
    for name in RECIPES:
        recipe = find_recipe(name)
        for number, source in enumerate(recipe.sources):
            first = (name, recipe.title) if number == 0 else ("", "")
            table.add_row(*first, source.name, source.files, source.where)
    console.print(table)
    table = Table(title="Methods")
    for column in ("method", "what it does", "options"):
        table.add_column(column)
    for method in METHODS.values():
        table.add_row(method.name, method.what, ", ".join(method.uses))
    console.print(table)
