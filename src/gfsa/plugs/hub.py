"""Upload filters, or a whole plugged model, to the Hub, with a model card."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from gfsa._version import __version__
from gfsa.plugs.saving.checkpoint import describe, save, write_filters
from gfsa.plugs.saving.files import OLD_DESCRIPTION, hub_library, is_hub_name
from gfsa.plugs.saving.identity import canonical_name
from gfsa.plugs.saving.pretrained import CONFIG_ENTRY, PEFT_ENTRY, is_of_diffusers
from gfsa.plugs.sites import check_model, counted, filters_of, is_sharded, plugged_sites

CARD = "README.md"
_OLD_FILES = (OLD_DESCRIPTION, "coefficients.svg")
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

    The card has the settings, the backbone, every layer's coefficients, the results, and the lines
    that load the upload. A card that the repository has already stays as it is, except for the
    section between gfsa's two comments, which is replaced or appended.

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
        TypeError: if ``model`` is not an ``nn.Module``, or ``results`` are not numbers or texts by
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
            # the other files of older versions do not belong to these filters
            delete_patterns=[*_OLD_FILES, *(_WEIGHTS if kind == "model" else ())],
        )
    return str(commit.commit_url)


def _check_arguments(
    repository: Any, base_model: str | None, results: Mapping[str, float | str] | None
) -> None:
    """Refuse names that the Hub does not have, and results that a card cannot show."""
    if not isinstance(repository, str) or not is_hub_name(repository):
        raise ValueError(f"repository must be 'user/name', got {repository!r:.80}")
    if base_model is not None and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base_model):
        raise ValueError(
            f"base_model must be a name on the Hub, 'user/name' or 'name', got {base_model!r:.80}"
        )
    if results is not None and not (
        isinstance(results, Mapping)
        and all(isinstance(name, str) for name in results)
        and all(isinstance(value, (int, float, str)) for value in results.values())
    ):
        raise TypeError(
            "results must be a dict of metric → number or text, such as {'CoLA, Matthews': 0.61}; "
            f"got {results!r:.120}"
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


BEGIN, END = "<!-- gfsa: begin -->", "<!-- gfsa: end -->"
# a marker without its partner belongs to no section
_SECTION = re.compile(f"{BEGIN}(?:(?!{BEGIN}).)*?{END}", re.DOTALL)

Weights = Literal["none", "model", "adapter"]


@dataclass(frozen=True)
class Card:
    """What the card of one upload says."""

    repository: str
    description: Mapping[str, Any]
    """As :func:`gfsa.plugs.saving.checkpoint.describe` gives it."""
    coefficients: Sequence[tuple[str, Sequence[Sequence[float]]]]
    """Layer names with ``coefficients[head][k]``; empty if a filter is not a polynomial."""
    base_model: str | None = None
    results: Mapping[str, float | str] | None = None
    weights: Weights = "none"
    """What was uploaded beside the filters."""
    model_class: str = "AutoModel"
    """The class of transformers that loads a whole model."""
    revision: str | None = None
    """The branch, if it is not the main one."""

    def new(self) -> str:
        """The whole file."""
        name = self.repository.rpartition("/")[2]
        return f"{self._metadata()}\n# {name}\n\n{self.section()}\n"

    def update(self, old: str) -> str:
        """An existing file with a new section; everything else in it stays as it is."""
        text, *others = _SECTION.split(old)
        if not others:
            return f"{old.rstrip()}\n\n{self.section()}\n"
        return text + self.section() + "".join(others)

    def section(self) -> str:
        parts = [BEGIN, self._introduction(), "## Use", self._use(), "## Settings"]
        parts += [self._settings()]
        if self.coefficients:
            parts += ["## Coefficients", self._table()]
        if self.results:
            parts += ["## Results", _table(("metric", "value"), self.results.items())]
        return "\n\n".join([*parts, END])

    def _metadata(self) -> str:
        lines = ["---", "library_name: gfsa", "tags:", "- gfsa", "- graph-filter-self-attention"]
        if self.base_model is not None:
            lines += [f"base_model: {self.base_model}"]
        return "\n".join([*lines, "---"])

    def _introduction(self) -> str:
        filters = self.description["filters"]
        what = {"none": "Filters for", "model": "A model with", "adapter": "An adapter with"}
        of = "" if self.base_model is None else f" (backbone: `{self.base_model}`)"
        return (
            f"{what[self.weights]} graph-filter self-attention in "
            f"{counted(len(filters), 'layer')} of `{self.description['model']}`{of}: "
            "each head applies a polynomial of its attention map, H = c0·I + c1·A + c2·A² + …, "
            f"with learned coefficients. Written by gfsa {__version__}."
        )

    def _use(self) -> str:
        place = json.dumps(self.repository)
        if self.revision is not None:
            # without it, what the main branch has would be loaded
            place += f", revision={json.dumps(self.revision)}"
        if self.weights == "model":
            return _code(
                "import gfsa",
                f"from transformers import {self.model_class}",
                "",
                f"model = gfsa.from_pretrained({self.model_class}, {place})",
            ) + (
                f"\n\n`{self.model_class}.from_pretrained` alone loads the weights **without the "
                "filters**: it lists them as UNEXPECTED in its load report."
            )
        if self.weights == "adapter":
            return _code("import gfsa", "", f"model = gfsa.load_peft(base_model, {place})") + (
                "\n\n`PeftModel.from_pretrained` alone loads the adapter **without the filters** "
                "if the base model is not plugged."
            )
        return _code("import gfsa", "", f"gfsa.load(model, {place})  # the backbone, unplugged")

    def _settings(self) -> str:
        groups: dict[str, list[str]] = {}
        for layer, entry in self.description["filters"].items():
            settings = {**entry["arguments"], "dropout_after": entry["dropout_after"]}
            settings |= {term: entry[term] for term in ("exclusive", "depth") if term in entry}
            shown = ", ".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
            groups.setdefault(f"`{entry['kind']}` {shown}", []).append(f"`{layer}`")
        rows = [
            (text, len(names), ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]}")
            for text, names in groups.items()
        ]
        return _table(("filter", "layers", "which"), rows)

    def _table(self) -> str:
        powers = max(len(head) for _, heads in self.coefficients for head in heads)
        head = ("layer", *(f"c{k}: mean (least … largest)" for k in range(powers)))
        rows = []
        for name, heads in self.coefficients:
            columns = [[h[k] for h in heads if k < len(h)] for k in range(powers)]
            rows.append((f"`{name}`", *(_range(column) for column in columns)))
        return _table(head, rows)


def coefficients_of(model: nn.Module) -> list[tuple[str, list[list[float]]]]:
    """Layer names with their heads' coefficients; empty if a filter is not a polynomial."""
    filters = filters_of(model)
    if not all(filter.is_polynomial for filter in filters.values()):
        return []
    return [
        (canonical_name(model, name), filter.coefficients().detach().cpu().tolist())
        for name, filter in filters.items()
    ]


def base_model_of(model: nn.Module) -> str | None:
    """The name on the Hub that a model was loaded from, as far as it knows."""
    config = getattr(model, "config", None)
    pretrained = getattr(model, "pretrained_cfg", None) or {}
    known = [getattr(config, "_name_or_path", None)]
    if isinstance(pretrained, Mapping):
        known.append(pretrained.get("hf_hub_id"))
    for name in known:
        if isinstance(name, str) and is_hub_name(name) and not Path(name).exists():
            return name
    return None


def _range(column: Sequence[float]) -> str:
    if not column:
        return ""
    mean = sum(column) / len(column)
    return f"{mean:.4g} ({min(column):.4g} … {max(column):.4g})"


def _code(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    # a line break or a bar in a cell would end it
    shown = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in shown)
