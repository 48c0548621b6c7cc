"""``transformers serve`` for plugged models: what it loads gets its filters.

transformers serves a model with ``generate``, or with continuous batching if it is asked to, which
filters of degree 1 alone can do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformers
import typer
from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager
from transformers.cli.serving.model_manager import ModelManager
from transformers.utils import logging

from gfsa.adapters.transformers.adapter import refusal_of_batching
from gfsa.plugs.saving.pretrained import (
    one_line,
    read_config,
    restore_filters,
    without_filters_in_load_report,
)

logger = logging.get_logger(__name__)


class NotServedError(ValueError):
    """The server cannot run the model that was asked for."""


class FilteredModelManager(ModelManager):
    """Loads the models of a server, each with the filters that its checkpoint has."""

    with_batching = False
    """Whether the server was started with ``--continuous-batching``."""

    def load_model_and_processor(
        self, model_id_and_revision: str, *args: Any, **kwargs: Any
    ) -> Any:
        if model_id_and_revision not in self.loaded_models:
            path, revision = model_id_and_revision.split("@", 1)
            if kwargs.get("gguf_file"):
                refusal: str | None = f"{path} is a GGUF file; serve it with transformers serve"
            else:
                refusal = refusal_to_serve(path, revision, self.trust_remote_code)
            if refusal is not None:
                raise self._refused(refusal)
        return super().load_model_and_processor(model_id_and_revision, *args, **kwargs)

    def _load_model(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
        with without_filters_in_load_report():
            model = super()._load_model(model_id_and_revision, *args, **kwargs)
        path, revision = model_id_and_revision.split("@", 1)
        if not restore_filters(model, path, {"revision": revision}):
            logger.warning(f"{path} has no filters: it is served as it is")
        refusal = refusal_of_batching(model) if self.with_batching else None
        if refusal is not None:
            raise self._refused(f"{refusal}. Without --continuous-batching it is served")
        return model

    def _refused(self, refusal: str) -> Exception:
        """The error that stops the start of a server, or answers a request for a model."""
        if self.force_model is not None:
            return NotServedError(refusal)
        from fastapi import HTTPException

        return HTTPException(status_code=400, detail=refusal)


def refusal_to_serve(path: str, revision: str, trust_remote_code: bool = False) -> str | None:
    """Why a checkpoint cannot be served, by its config alone; None if it generates text."""
    expected = "gfsa serve expects a causal language model"
    try:
        config = read_config(path, revision=revision, trust_remote_code=trust_remote_code)
    except ValueError as error:
        return str(error)
    name = next(iter(config.architectures or ()), None)
    if name is None:
        return (
            f"the config of {path} names no architecture; {expected}. Save the model with "
            "model.save_pretrained, which writes the name"
        )
    # transformers serve finds the class by its name, and knows no code of other sources
    model_class = getattr(transformers, name, None)
    if model_class is None:
        return (
            f"{path} is a {name}, which transformers {transformers.__version__} does not have; "
            f"{expected} of transformers. Generate with model.generate instead"
        )
    if not model_class.can_generate():
        return (
            f"{path} is a {name}, which generates no text; {expected}. Load it with "
            f'gfsa.from_pretrained(transformers.{name}, "{path}") instead, and call it'
        )
    return None


def run(arguments: Sequence[str]) -> None:
    """``transformers serve`` with these arguments, until it is stopped.

    transformers' command builds its manager of models itself, of the class that it looks up here.

    Raises:
        ValueError, OSError: if the server cannot start with them, or the model cannot be loaded.
            An error while it runs is the answer to a request.
    """
    from safetensors import SafetensorError

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(Serve)

    options = {"with_batching": "--continuous-batching" in arguments}
    manager: Any = type("Manager", (FilteredModelManager,), options)
    model_manager.ModelManager = manager
    try:
        app(list(arguments), prog_name="gfsa serve")
    except SafetensorError as error:
        raise ValueError(f"the weights are damaged: {one_line(error)}") from error
    finally:
        model_manager.ModelManager = ModelManager
