"""``gfsa serve``: ``transformers serve`` for folders that were saved from plugged models."""

from __future__ import annotations

import typer


def serve(context: typer.Context) -> None:
    """Serve a plugged model of transformers over HTTP: transformers serve, with the filters."""
    try:
        from gfsa.adapters.transformers.serving import run

        run(context.args)
    except (ImportError, ValueError, OSError) as error:
        # transformers looks for the packages of its server when it starts, and names them
        message = " ".join(str(error).split())
        if isinstance(error, ModuleNotFoundError):
            message += ": pip install 'transformers[serving]'"
        typer.echo(f"gfsa serve: {message}", err=True)
        raise typer.Exit(2) from error


# every option is one of transformers serve, --help too
serve.context_settings = {  # type: ignore[attr-defined]
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}
