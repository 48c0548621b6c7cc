"""The command line, ``gfsa``.

A command is a function with typer annotations in a module of its own that imports nothing heavy at
its top, and a line in ``COMMANDS``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from gfsa._version import __version__

if TYPE_CHECKING:
    import typer

COMMANDS = {
    "demo": "gfsa.demo.command:demo",
    "train": "gfsa.recipes.command:train",
    "diagnose": "gfsa.lens.command:diagnose",
    "results": "gfsa.recipes.results.command:results",
    "bench": "gfsa.bench.command:bench",
    "info": "gfsa.info:info",
}


def main() -> None:
    """What the ``gfsa`` script runs."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f"gfsa's command line needs {error.name}: pip install 'gfsa[cli]'")
    build()()


def build() -> typer.Typer:
    """The app with every command of ``COMMANDS``."""
    import typer

    app = typer.Typer(
        help="Graph-filter self-attention for any PyTorch Transformer.",
        no_args_is_help=True,
        add_completion=False,
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

    for name, target in COMMANDS.items():
        module, _, function = target.partition(":")
        app.command(name)(getattr(import_module(module), function))
    return app
