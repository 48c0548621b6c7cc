"""``transformers serve`` for folders that were saved from plugged models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager
from transformers.cli.serving.model_manager import ModelManager
from transformers.utils import logging

from gfsa.plugs.adapters.transformers.pretrained import (
    restore_filters,
    without_filters_in_load_report,
)

logger = logging.get_logger(__name__)


class FilteredModelManager(ModelManager):
    """Loads the models of a server, each with the filters that its checkpoint has."""

    def _load_model(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("gguf_file"):
            raise ValueError(
                f"{model_id_and_revision} is a GGUF file, which has no filters: serve it with "
                "transformers serve"
            )
        with without_filters_in_load_report():
            model = super()._load_model(model_id_and_revision, *args, **kwargs)
        path, revision = model_id_and_revision.split("@", 1)
        if not restore_filters(model, path, {"revision": revision}):
            logger.warning(f"{path} has no filters: it is served as it is")
        return model


def run(arguments: Sequence[str]) -> None:
    """``transformers serve`` with these arguments, until it is stopped.

    transformers' command builds its manager of models itself, so this process gives it ours.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(Serve)
    model_manager.ModelManager = FilteredModelManager
    try:
        app(list(arguments), prog_name="gfsa serve")
    finally:
        model_manager.ModelManager = ModelManager
