"""``transformers serve`` for folders that were saved from plugged models."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import transformers
import typer
from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager
from transformers.cli.serving.model_manager import ModelManager
from transformers.utils import logging

from gfsa.plugs.saving.config_files import one_line, read_config
from gfsa.plugs.saving.pretrained import (
    restore_filters,
    without_filters_in_load_report,
)

logger = logging.get_logger(__name__)


class NotServedError(ValueError):
    """The model that was asked for is none that a server of text can run."""


class FilteredModelManager(ModelManager):
    """Loads the models of a server, each with the filters that its checkpoint has."""

    def load_model_and_processor(
        self, model_id_and_revision: str, *args: Any, **kwargs: Any
    ) -> Any:
        if model_id_and_revision not in self.loaded_models and not kwargs.get("gguf_file"):
            path, revision = model_id_and_revision.split("@", 1)
            refusal = refusal_to_serve(path, revision, self.trust_remote_code)
            if refusal is not None:
                raise self._refused(refusal)
        return super().load_model_and_processor(model_id_and_revision, *args, **kwargs)

    def _refused(self, refusal: str) -> Exception:
        """What stops the start of a server; a request for a model gets it as its answer."""
        if self.force_model is not None:
            return NotServedError(refusal)
        from fastapi import HTTPException

        return HTTPException(status_code=400, detail=refusal)

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

    transformers' command builds its manager of models itself. The name under which it looks the
    class up is ours until that manager is built, and no longer.

    Raises:
        ValueError, OSError: if the server cannot start with them, or the model cannot be loaded.
            An error while it runs is the answer to a request.
    """
    from safetensors import SafetensorError

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_with_checked_options(Serve))

    class OnlyManager(FilteredModelManager):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            model_manager.ModelManager = ModelManager
            super().__init__(*args, **kwargs)

    model_manager.ModelManager = OnlyManager
    try:
        app(list(arguments), prog_name="gfsa serve")
    except SafetensorError as error:
        raise ValueError(f"the weights are damaged: {one_line(error)}") from error
    finally:
        model_manager.ModelManager = ModelManager


def _with_checked_options(command: type[Serve]) -> Callable[..., Serve]:
    """The command, which itself raises KeyError and JSONDecodeError for values of two options."""

    def checked(**options: Any) -> Serve:
        level, template = options.get("log_level", "info"), options.get("chat_template_kwargs")
        if level.lower() not in logging.log_levels:
            known = ", ".join(logging.log_levels)
            raise typer.BadParameter(f"--log-level must be one of {known}, got {level!r:.80}")
        try:
            json.loads(template or "{}")
        except ValueError as error:
            raise typer.BadParameter(
                f"--chat-template-kwargs must be a JSON object, got {template!r:.80}"
            ) from error
        return command(**options)

    # typer reads the options from them
    checked.__doc__ = command.__doc__
    checked.__annotations__ = command.__init__.__annotations__
    checked.__signature__ = inspect.signature(command)  # type: ignore[attr-defined]
    return checked
