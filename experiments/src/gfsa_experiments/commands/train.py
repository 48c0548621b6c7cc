"""``gfsa train``: run a sweep, or the sweeps of a plan, and append a row for each run."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from gfsa_experiments.runs.run import Run
    from gfsa_experiments.runs.sweep import Request

# click's class; newer versions of typer have their own copy of click
_UsageError: Any = typer.BadParameter.__base__

# the flags that describe a sweep, which a line of a plan may have, by the names of the parameters
_SWEEP = {"method": "--method", "K": "--K", "seeds": "--seeds", "setting": "--set"}
_SWEEP |= {"each": "--each"}


def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="text, glue, causal_lm, code, image …")] = "",
    method: Annotated[
        str, typer.Option(help="plain, degree1, exclusive …, separated by commas.")
    ] = "plain,gfsa",
    K: Annotated[str, typer.Option("--K", help="Order of the filter: 3, or 2-10 for all.")] = "",
    seeds: Annotated[str, typer.Option(help="0,1,2 or 0-4.")] = "0",
    data_dir: Annotated[Path, typer.Option(envvar="GFSA_DATA", help="Folder of data sets.")] = Path(
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
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    results: Annotated[Path, typer.Option(help="Folder of the rows.")] = Path("results"),
    resume: Annotated[bool, typer.Option("--resume", help="Resume interrupted runs.")] = False,
    missing: Annotated[
        bool, typer.Option("--missing", help="Only runs without a row in the results.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Show recipes and methods.")] = False,
) -> None:
    """Train with and without a graph filter, and record the results.

    Example: gfsa train text --set data=my.csv --set text=review --set label=stars --seeds 0-4
    """
    from rich.console import Console

    # launchers set the rank; asking torch for it would initialise a GPU in this process
    rank = int(os.environ.get("RANK", 0))
    console = Console(quiet=rank > 0)
    # as for python -m, modules of the user's own are found in the working directory
    sys.path.append(os.getcwd())
    if show:
        _print_recipes_and_methods(console)
        return
    from gfsa_experiments.engine.whole_files import refuse_inside_file
    from gfsa_experiments.runs.row import check_table, read_rows
    from gfsa_experiments.runs.sweep import Request, print_line, record_all

    if recipe and plan is not None:
        raise typer.BadParameter(
            f"the lines of a --plan name their recipes; leave {recipe} out, or the plan"
        )
    if not recipe and plan is None:
        raise typer.BadParameter("name a recipe (gfsa train --list shows them), or give a --plan")
    given = [_SWEEP[name] for name in _given(context) if name in _SWEEP]
    if plan is not None and given:
        raise typer.BadParameter(
            f"{', '.join(given)} would have no effect with --plan, whose lines have their own; "
            "write it into the plan (a line that begins with common is for all lines below it)"
        )
    if jobs > 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise typer.BadParameter(
            "--jobs needs a single process, but accelerate launch has started several"
        )
    places: dict[str, Any] = {"data_dir": data_dir, "out": out, "device": device}
    places |= {"resume": resume, "jobs": jobs}
    try:
        refuse_inside_file(out / "run.json")
        if plan is not None:
            # if time runs out, every method has the same seeds
            runs = sorted(runs_of_plan(plan, **places), key=lambda run: run.config.seed)
        else:
            runs = Request(recipe, method, K, seeds, setting, each).runs(**places)
        recorded: set[tuple[object, ...]] = set()
        for table in {results / f"{run.key().recipe}.csv" for run in runs}:
            check_table(table)
            # a damaged table is found now, not when the first row is appended
            recorded |= {row.key for row in read_rows(table)}
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if missing:
        every, runs = len(runs), [run for run in runs if run.key() not in recorded]
        if not runs:
            console.print(f"{results} has all of these runs")
            return
        console.print(f"{results} has {every - len(runs)} of {every} runs, which are left out")
    _print_config(console, runs)
    # what to think about before the runs are compared, each sentence once
    for sentence in dict.fromkeys(run.config.advice(run.options.filter_lr) for run in runs):
        if sentence:
            print_line(console, sentence, style="yellow")
    try:
        failed = record_all(console, runs, jobs, results, write=rank == 0)
    except KeyboardInterrupt:
        print_line(console, "interrupted; the same command with --resume goes on", "yellow")
        raise
    if failed:
        raise typer.Exit(1)


def runs_of_plan(path: Path, **places: Any) -> list[Run]:
    """The runs of a file with arguments of ``gfsa train`` on each line; an error names its line.

    ``#`` begins a comment. A line ``common`` with arguments adds these to every line below it, up
    to the next ``common``.
    """
    from gfsa_experiments.runs.sweep import one_per_folder

    try:
        # some editors write a byte order mark
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--plan {path} is not text in UTF-8 ({error.reason}, byte {error.start}); expected "
            "arguments of gfsa train on each line"
        ) from error
    runs: list[Run] = []
    common: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            words = shlex.split(line, comments=True)
            if words[:1] == ["common"]:
                common = words[1:]
            elif words:
                runs += _request_of([words[0], *common, *words[1:]]).runs(**places)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    if not runs:
        raise ValueError(f"{path} has no runs in it")
    try:
        return one_per_folder(runs)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _request_of(words: list[str]) -> Request:
    """A line of a plan, parsed by the command itself."""
    from gfsa_experiments.runs.sweep import Request

    app = typer.Typer(add_completion=False)
    app.command(add_help_option=False)(train)
    command = typer.main.get_command(app)
    try:
        context = command.make_context("gfsa train", list(words))
    except _UsageError as error:
        raise ValueError(error.format_message()) from error
    others = [name for name in _given(context) if name not in ("recipe", *_SWEEP)]
    if others:
        raise ValueError(
            f"a line of a plan takes {', '.join(_SWEEP.values())}; give the command itself "
            f"--{', --'.join(name.replace('_', '-') for name in others)}"
        )
    return Request(**{name: context.params[name] for name in ("recipe", *_SWEEP)})


def _given(context: Any) -> list[str]:
    """The parameters of a command that were given on its command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def _print_config(console: Console, runs: list[Run]) -> None:
    """The settings of the first run that have an effect, and the options of each method."""
    from gfsa_experiments.engine.config import as_text
    from gfsa_experiments.runs.methods import find_method
    from gfsa_experiments.runs.sweep import print_line

    config = runs[0].config
    used = {name: value for name, value in vars(config).items() if name not in config.unused()}
    print_line(console, f"Settings of {runs[0]}: {as_text(used)}")
    methods: dict[str, Run] = {}
    for run in runs:
        methods.setdefault(run.method, run)
    for method, run in methods.items():
        options = find_method(method).used_options(run.options)
        if options:
            chosen = {name: getattr(run.options, name) for name in options}
            print_line(console, f"Options of {method}: {as_text(chosen)}")


def _print_recipes_and_methods(console: Console) -> None:
    from gfsa_experiments.runs.methods import METHODS
    from gfsa_experiments.runs.sweep import print_line
    from gfsa_experiments.tasks import RECIPES, find_recipe

    print_line(console, "Recipes (docs/recipes has a page for each):")
    for name in RECIPES:
        print_line(console, f"  {name:<12}{find_recipe(name).title}")
    print_line(console, "Methods, and the options that each takes by --set:")
    for method in METHODS.values():
        options = f" ({', '.join(method.uses)})" if method.uses else ""
        print_line(console, f"  {method.name:<16}{method.what}{options}")
