"""Upload filters, or a whole plugged model, to the Hub, with a model card."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
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

    The card has the backbone, every filter with its coefficients, the results, and the lines
    that load the upload. A card that the repository has already stays as it is, except for the
    section between gfsa's two comments, which is replaced or appended.

    Args:
        model: a plugged model.
        repository: ``"user/name"``; it is created if it does not exist.
        weights: upload what ``model.save_pretrained`` writes, too: a whole transformers model,
            which :func:`gfsa.from_pretrained` loads, or an adapter of peft, which
            :func:`gfsa.load_peft` loads. The commit deletes weights of an earlier upload under
            other file names, which would be loaded in place of these.
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
    _refuse(model, repository, weights, base_model, {} if results is None else results)
    hub = hub_library("gfsa.push_to_hub")
    backbone = base_model or base_model_of(model)
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
            what = "Filters for"
            use = _code(f"gfsa.load(model, {place})  # the backbone, unplugged")
        else:
            model.save_pretrained(folder)  # type: ignore[operator]
            write_filters(model, folder)
            is_adapter = (folder / "adapter_config.json").is_file()
            what = "An adapter with" if is_adapter else "A model with"
            use = _mark(model, folder, place, is_adapter)
            stale += () if is_adapter else _WEIGHTS
        section = _section(model, what, use, backbone, results)
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
            about = hub.ModelCardData(library_name="gfsa", tags=tags, base_model=backbone)
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
    kind = type(model).__name__
    if not filters_of(model):
        raise ValueError(f"{kind} has no filters to upload; gfsa.plug(model) first")
    if any(is_sharded(site) for site in plugged_sites(model).values()):
        raise ValueError(
            "the filters are sharded over processes: gfsa.save them on every process, gfsa.load "
            "them into a model that is not sharded, and upload from that"
        )
    is_loaded_by_us = hasattr(model, "save_pretrained") and not is_of_diffusers(type(model))
    if weights and not is_loaded_by_us:
        raise ValueError(
            "weights=True is for models of transformers and adapters of peft, got a "
            f"{kind}: pass weights=False, and upload the weights by their own library after "
            "gfsa.unplug"
        )


def _mark(model: nn.Module, folder: Path, place: str, is_adapter: bool) -> str:
    """Mark a whole model or an adapter as one with filters; returns how to load it."""
    if is_adapter:
        # peft warns about entries that it does not know
        file, key = folder / "adapter_config.json", PEFT_ENTRY
        use = _code(f"model = gfsa.load_peft(base_model, {place})")
        alone = (
            "`PeftModel.from_pretrained` alone loads the adapter **without the filters** if the "
            "base model is not plugged."
        )
    else:
        file, key = folder / "config.json", CONFIG_ENTRY
        cls = type(model)
        name = cls.__name__ if cls.__module__.startswith("transformers.") else "AutoModel"
        imports = f"from transformers import {name}\n"
        use = _code(f"model = gfsa.from_pretrained({name}, {place})", imports)
        alone = (
            f"`{name}.from_pretrained` alone loads the weights **without the filters**: it lists "
            "them as UNEXPECTED in its load report."
        )
    content = json.loads(file.read_text(encoding="utf-8"))
    content[key] = {"layers": len(filters_of(model)), "gfsa": __version__}
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return f"{use}\n\n{alone}"


def base_model_of(model: nn.Module) -> str | None:
    """The name on the Hub that a model was loaded from, as far as it knows."""
    pretrained = getattr(model, "pretrained_cfg", None)
    known = [getattr(getattr(model, "config", None), "_name_or_path", None)]
    known += [pretrained.get("hf_hub_id")] if isinstance(pretrained, Mapping) else []
    names = (name for name in known if isinstance(name, str) and is_hub_name(name))
    return next((name for name in names if not Path(name).exists()), None)


def _section(
    model: nn.Module,
    what: str,
    use: str,
    backbone: str | None,
    results: Mapping[str, float | str] | None,
) -> str:
    """The part of the card that gfsa writes."""
    filters = {canonical_name(model, name): f for name, f in filters_of(model).items()}
    of = "" if backbone is None else f" (backbone: `{backbone}`)"
    powers = range(1 + max((f.degree for f in filters.values() if f.is_polynomial), default=-1))
    columns = [f"c{k}: mean (least … largest)" for k in powers]
    rows: list[Sequence[Any]] = [("layer", "filter", *columns)]
    for name, filter in filters.items():
        entry = filter.describe()
        settings = {**entry.pop("arguments"), **entry}
        kind = settings.pop("kind")
        shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
        c = filter.coefficients().detach().T if filter.is_polynomial else ()
        ranges = [f"{x.mean():.4g} ({x.min():.4g} … {x.max():.4g})" for x in c]
        ranges += [""] * (len(powers) - len(ranges))
        rows.append((f"`{name}`", f"`{kind}` {shown}", *ranges))
    parts = [
        BEGIN,
        f"{what} graph-filter self-attention in {counted(len(filters), 'layer')} of "
        f"`{type(model).__name__}`{of}: each head applies a polynomial of its attention map, "
        f"H = c0·I + c1·A + c2·A² + …, with learned coefficients. Written by gfsa {__version__}.",
        *("## Use", use, "## Filters", _table(rows)),
        *(("## Results", _table([("metric", "value"), *results.items()])) if results else ()),
        END,
    ]
    return "\n\n".join(parts)


def _code(call: str, imports: str = "") -> str:
    return f"```python\nimport gfsa\n{imports}\n{call}\n```"


def _table(rows: Sequence[Sequence[Any]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    # a line break or a bar in a cell would end it
    shown = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in shown)
