"""The command line, ``gfsa``.

A command is a function with typer annotations in a module of its own that imports nothing heavy at
its top, torch included: ``gfsa --help`` imports every command. The library's own are in
``COMMANDS``; other distributions add theirs through the entry-point group ``gfsa.commands``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from gfsa._version import __version__

if TYPE_CHECKING:
    import typer

GROUP = "gfsa.commands"

# the library's own commands, each a function of the same name in this module
COMMANDS = {
    "diagnose": "gfsa.lens.command",
    "info": "gfsa.info",
    "tune": "gfsa.tune",
}

# commands of the distributions that are developed beside the library: where to get each
ELSEWHERE = {
    "demo": "gfsa-experiments",
    "train": "gfsa-experiments",
    "results": "gfsa-experiments",
    "bench": "gfsa-benchmarks",
}


def main() -> None:
    """What the ``gfsa`` script runs."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f"gfsa's command line needs {error.name}: pip install typer rich")
    build()()


def build() -> typer.Typer:
    """The app with every installed command, and a hint for each of those that are not."""
    import typer
    from typer.core import TyperCommand, TyperGroup

    class PlainFlags:
        def get_params(self, ctx: Any) -> list[Any]:
            found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
            for option in found:
                if getattr(option, "is_flag", False):
                    # help would show the type of a value, which a flag does not take
                    option.metavar = ""
            return found

    app = typer.Typer(
        cls=type("Group", (PlainFlags, TyperGroup), {}),
        help="Graph-filter self-attention for any PyTorch Transformer.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )

    def print_version(wanted: bool) -> None:
        if wanted:
            typer.echo(__version__)
            raise typer.Exit

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", is_eager=True, callback=print_version, help="Print the version."
        ),
    ) -> None:
        pass

    plain_command = type("Command", (PlainFlags, TyperCommand), {})
    added = {entry.name: entry for entry in entry_points(group=GROUP)}
    # in the order in which people meet them
    for name in dict.fromkeys((*ELSEWHERE, *added, *COMMANDS)):
        if name in COMMANDS:
            command = getattr(import_module(COMMANDS[name]), name)
        else:
            command = added[name].load() if name in added else _missing(name, ELSEWHERE[name])
        settings = getattr(command, "context_settings", None)
        app.command(name, cls=plain_command, context_settings=settings)(command)
    return app


def _missing(name: str, distribution: str) -> Any:
    """A command that says which distribution has it, whatever its arguments."""
    import typer

    def missing() -> None:
        folder = distribution.removeprefix("gfsa-")
        typer.echo(
            f"gfsa {name} is a command of {distribution}, which is not installed. "
            f"In a checkout of gfsa: pip install ./{folder}",
            err=True,
        )
        raise typer.Exit(2)

    missing.__doc__ = f"(in {distribution}, which is not installed)"
    anything = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    missing.context_settings = anything  # type: ignore[attr-defined]
    return missing
