"""Upload filters, or a whole plugged model, to the Hub with a model card."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from gfsa._version import __version__
from gfsa.plugs.hub.card import (
    PICTURE,
    Card,
    Weights,
    base_model_of,
    check_results,
    coefficients_of,
    is_hub_name,
)
from gfsa.plugs.hub.download import hub_library
from gfsa.plugs.hub.picture import coefficients_svg
from gfsa.plugs.peft_adapters import PEFT_ENTRY
from gfsa.plugs.saving.checkpoint import describe, save, write_filters
from gfsa.plugs.saving.files import OLD_DESCRIPTION
from gfsa.plugs.saving.pretrained import CONFIG_ENTRY, is_of_diffusers
from gfsa.plugs.sites import check_model, filters_of, is_sharded, plugged_sites

CARD = "README.md"
# the weights of a transformers model, in one file or in several
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model-?????-of-?????.safetensors",
)


def push_to_hub(
    model: nn.Module,
    repository: str,
    *,
    weights: bool = False,
    base_model: str | None = None,
    results: Mapping[str, float | str] | None = None,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Upload the filters of ``model`` to the Hugging Face Hub, as one commit, with a model card.

    .. code-block:: python

        gfsa.push_to_hub(model, "user/name", results={"CoLA, Matthews correlation": 0.61})
        gfsa.load(another_model, "user/name")

    The card has the settings, the backbone, every layer's coefficients as a picture and a table,
    the results, and the lines that load the upload. A card that the repository has already stays
    as it is, except for the section between gfsa's two comments, which is replaced or appended.

    Args:
        model: a plugged model.
        repository: ``"user/name"``; it is created if it does not exist.
        weights: upload what ``model.save_pretrained`` writes, too: a whole transformers model,
            which :func:`gfsa.from_pretrained` loads, or an adapter of peft, which
            :func:`gfsa.load_peft` loads. Weights of an earlier upload that have other file names
            (in one file before, in several now) are deleted in the same commit: they would be
            loaded in place of these.
        base_model: the backbone's name on the Hub, for the card; by default the name that the
            model was loaded from, if it knows one.
        results: metric → value, for the card.
        private: whether a new repository is private.
        revision: the branch to commit to.
        token: an access token; by default the one that you are logged in with.
        commit_message: of the commit.

    Returns:
        The address of the commit.

    Raises:
        TypeError: if ``model`` is no ``nn.Module``, or ``results`` are not numbers or texts by
            name.
        ImportError: if huggingface_hub is not installed.
        ValueError: if the model has no filters or they are sharded over processes, a name is not
            valid, or ``weights=True`` cannot save the model's weights.
    """
    check_model(model)
    _check_arguments(repository, base_model, results)
    _refuse_model(model, weights)
    hub = hub_library("gfsa.push_to_hub")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kind: Weights = _save_weights(model, folder) if weights else "none"
        # the weights, if they are uploaded, are in the folder already
        (write_filters if weights else save)(model, folder)
        card = Card(
            repository,
            describe(model),
            coefficients_of(model),
            base_model=base_model or base_model_of(model),
            results=results,
            weights=kind,
            model_class=_class_for(model),
            revision=revision,
        )
        if card.coefficients:
            (folder / PICTURE).write_text(coefficients_svg(card.coefficients), encoding="utf-8")
        api = hub.HfApi(token=token)
        api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        old = _card_on_hub(hub, api, repository, revision)
        text = card.new() if old is None else card.update(old)
        (folder / CARD).write_text(text, encoding="utf-8")
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=revision,
            commit_message=commit_message or "Filters, by gfsa",
            # the second file of older versions does not belong to these filters
            delete_patterns=[OLD_DESCRIPTION, *(_WEIGHTS if kind == "model" else ())],
        )
    return str(commit.commit_url)


def _check_arguments(
    repository: Any, base_model: str | None, results: Mapping[str, float | str] | None
) -> None:
    """Refuse names that the Hub does not have, and results that a card cannot show."""
    if not isinstance(repository, str) or not is_hub_name(repository):
        raise ValueError(f"repository must be 'user/name', got {repository!r:.80}")
    check_results(results)
    if base_model is not None and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base_model):
        raise ValueError(
            f"base_model must be a name on the Hub, 'user/name' or 'name', got {base_model!r:.80}"
        )


def _refuse_model(model: nn.Module, weights: bool) -> None:
    """Raise if the model has no whole filters to upload, or no weights that can be loaded again."""
    if not filters_of(model):
        raise ValueError(f"{type(model).__name__} has no filters to upload; gfsa.plug(model) first")
    if any(is_sharded(site) for site in plugged_sites(model).values()):
        raise ValueError(
            "the filters are sharded over processes: gfsa.save(model, folder) on every process, "
            "gfsa.load them into a model that is not sharded, and upload from that"
        )
    if weights and not callable(getattr(model, "save_pretrained", None)):
        raise ValueError(
            f"{type(model).__name__} has no save_pretrained, so its weights cannot be uploaded "
            "with the filters; pass weights=False and upload them by their own library"
        )
    if weights and is_of_diffusers(type(model)):
        raise ValueError(
            f"{type(model).__name__} is a model of diffusers, whose weights gfsa.from_pretrained "
            "does not load: pass weights=False, and upload them with model.push_to_hub after "
            "gfsa.unplug"
        )


def _class_for(model: nn.Module) -> str:
    """The class of transformers that loads the model, for the card."""
    cls = type(model)
    return cls.__name__ if cls.__module__.startswith("transformers.") else "AutoModel"


def _save_weights(model: Any, folder: Path) -> Weights:
    """Write the model with its filters, and mark it; returns what it is."""
    model.save_pretrained(folder)
    count = len(filters_of(model))
    if (folder / "adapter_config.json").is_file():
        # peft warns about entries that it does not know, by their name
        _add_entry(folder / "adapter_config.json", PEFT_ENTRY, count)
        return "adapter"
    _add_entry(folder / "config.json", CONFIG_ENTRY, count)
    return "model"


def _add_entry(file: Path, key: str, count: int) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    content[key] = {"layers": count, "gfsa": __version__}
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _card_on_hub(hub: Any, api: Any, repository: str, revision: str | None) -> str | None:
    """The card that the repository has already, or None."""
    try:
        file = api.hf_hub_download(repository, CARD, revision=revision)
    except (hub.errors.EntryNotFoundError, hub.errors.RevisionNotFoundError):
        return None
    return Path(file).read_text(encoding="utf-8")
