"""``python -m gfsa_experiments train …``: the commands without an installed entry point."""

from __future__ import annotations

import typer

from gfsa_experiments.commands.demo import demo
from gfsa_experiments.commands.results import results
from gfsa_experiments.commands.train import train


def main() -> None:
    """Run ``demo``, ``train`` or ``results``."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    for command in (demo, train, results):
        app.command()(command)
    app()


if __name__ == "__main__":
    main()
