"""Upload filters, or a whole plugged model, to the Hub, with a model card."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from gfsa._version import __version__
from gfsa.plugs.saving.checkpoint import save, write_filters
from gfsa.plugs.saving.files import OLD_DESCRIPTION, hub_library, is_hub_name
from gfsa.plugs.saving.identity import canonical_name
from gfsa.plugs.saving.pretrained import CONFIG_ENTRY, PEFT_ENTRY, is_of_diffusers
from gfsa.plugs.sites import check_model, counted, filters_of, is_sharded, plugged_sites

CARD = "README.md"
BEGIN, END = "<!-- gfsa: begin -->", "<!-- gfsa: end -->"
# a marker without its partner belongs to no section
_SECTION = re.compile(f"{BEGIN}(?:(?!{BEGIN}).)*?{END}", re.DOTALL)
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

    The card has the backbone, every filter with the means of its coefficients, the results, and
    the line that loads the upload. Of a card that the repository has already, the section between
    gfsa's two comments is replaced; without one, it is appended.

    Args:
        model: a plugged model.
        repository: ``"user/name"``; it is created if it does not exist.
        weights: upload what ``model.save_pretrained`` writes, too: a whole transformers model for
            :func:`gfsa.from_pretrained`, or an adapter of peft for :func:`gfsa.load_peft`. Weights
            of an earlier upload under other file names are deleted.
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
        ValueError: if the model has no filters or they are sharded over processes, a name is not
            valid, or ``weights=True`` cannot save the model's weights.
    """
    check_model(model)
    results = {} if results is None else results
    _refuse(model, repository, weights, base_model, results)
    hub = hub_library("gfsa.push_to_hub")
    of_timm: Any = getattr(model, "pretrained_cfg", None) or {}
    loaded_from = getattr(getattr(model, "config", None), "_name_or_path", of_timm.get("hf_hub_id"))
    if base_model is None and isinstance(loaded_from, str) and is_hub_name(loaded_from):
        base_model = None if Path(loaded_from).exists() else loaded_from
    place = json.dumps(repository)
    if revision is not None:
        # without it, what the main branch has would be loaded
        place += f", revision={json.dumps(revision)}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # what a file of an older version says does not belong to these filters
        stale = [OLD_DESCRIPTION]
        if not weights:
            save(model, folder)
            use = f"gfsa.load(model, {place})  # the backbone, unplugged"
        else:
            write_filters(model, folder)
            model.save_pretrained(folder)  # type: ignore[operator]
            is_adapter = (folder / "adapter_config.json").is_file()
            use = _mark(model, folder, place, is_adapter)
            stale += () if is_adapter else _WEIGHTS
        section = _section(model, use, results)
        api = hub.HfApi(token=token)
        api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        try:
            old = Path(api.hf_hub_download(repository, CARD, revision=revision))
            text, *others = _SECTION.split(old.read_text(encoding="utf-8"))
            text = text + section + "".join(others) if others else f"{text.rstrip()}\n\n{section}\n"
        except (hub.errors.EntryNotFoundError, hub.errors.RevisionNotFoundError):
            tags = ["gfsa", "graph-filter-self-attention"]
            about = hub.ModelCardData(library_name="gfsa", tags=tags, base_model=base_model)
            title = repository.rpartition("/")[2]
            text = f"---\n{about.to_yaml()}\n---\n\n# {title}\n\n{section}\n"
        (folder / CARD).write_text(text, encoding="utf-8")
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=revision,
            commit_message=commit_message or "Filters, by gfsa",
            delete_patterns=stale,
        )
    return str(commit.commit_url)


def _refuse(
    model: nn.Module, repository: Any, weights: bool, base_model: str | None, results: Any
) -> None:
    """Raise for what the Hub does not take, a card cannot show, or nobody could load again."""
    if not isinstance(results, Mapping) or not all(
        isinstance(name, str) and isinstance(value, (int, float, str))
        for name, value in results.items()
    ):
        raise TypeError(
            "results must be a dict of metric → number or text, such as {'CoLA, Matthews': 0.61}; "
            f"got {results!r:.120}"
        )
    if not isinstance(repository, str) or not is_hub_name(repository):
        raise ValueError(f"repository must be 'user/name', got {repository!r:.80}")
    if base_model is not None and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base_model):
        raise ValueError(
            f"base_model must be a name on the Hub, 'user/name' or 'name', got {base_model!r:.80}"
        )
    if any(is_sharded(site) for site in plugged_sites(model).values()):
        raise ValueError(
            "the filters are sharded over processes: gfsa.save them on every process, gfsa.load "
            "them into a model that is not sharded, and upload from that"
        )
    if weights and (not hasattr(model, "save_pretrained") or is_of_diffusers(type(model))):
        raise ValueError(
            "weights=True is for models of transformers and adapters of peft, got a "
            f"{type(model).__name__}: pass weights=False, and upload its weights by its own library"
        )


def _mark(model: nn.Module, folder: Path, place: str, is_adapter: bool) -> str:
    """Mark a whole model or an adapter as one with filters; returns the line that loads it."""
    if is_adapter:
        # peft warns about entries that it does not know
        file, key = folder / "adapter_config.json", PEFT_ENTRY
        use = f"gfsa.load_peft(base_model, {place})"
    else:
        file, key = folder / "config.json", CONFIG_ENTRY
        use = f"gfsa.from_pretrained({type(model).__name__}, {place})"
    content = json.loads(file.read_text(encoding="utf-8"))
    content[key] = {"layers": len(plugged_sites(model)), "gfsa": __version__}
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return use


def _section(model: nn.Module, use: str, results: Mapping[str, float | str]) -> str:
    """The part of the card that gfsa writes."""
    filters = []
    for name, filter in filters_of(model).items():
        means = filter.coefficients().detach().mean(0)
        shown = ", ".join(f"c{power} = {mean:.4g}" for power, mean in enumerate(means))
        filters.append(f"- `{canonical_name(model, name)}`: `{filter}`, {shown}")
    # a line break in an item would end it
    items = [f"- {name}: {value}".replace("\n", " ") for name, value in results.items()]
    parts = [
        BEGIN,
        f"Graph-filter self-attention in {counted(len(filters), 'layer')} of "
        f"`{type(model).__name__}`: each head applies a polynomial of its attention map, "
        f"H = c0·I + c1·A + c2·A² + … Written by gfsa {__version__}. `from_pretrained` of other "
        "libraries loads weights **without the filters**.",
        f"```python\n{use}\n```",
        "## Filters, with the mean of their coefficients over the heads",
        "\n".join(filters),
        *(("## Results", "\n".join(items)) if items else ()),
        END,
    ]
    return "\n\n".join(parts)
