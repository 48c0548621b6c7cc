"""The model card of uploaded filters: settings, backbone, coefficients, results, how to load."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from gfsa._version import __version__
from gfsa.plugs.report import counted
from gfsa.plugs.saving.identity import canonical_name
from gfsa.plugs.sites import filters_of

BEGIN, END = "<!-- gfsa: begin -->", "<!-- gfsa: end -->"
PICTURE = "coefficients.svg"
# a marker without its partner belongs to no section
_SECTION = re.compile(f"{BEGIN}(?:(?!{BEGIN}).)*?{END}", re.DOTALL)

Weights = Literal["none", "model", "adapter"]

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Card:
    """What the card of one upload says."""

    repository: str
    description: Mapping[str, Any]
    """As :func:`gfsa.plugs.saving.checkpoint.describe` gives it."""
    coefficients: Sequence[tuple[str, Sequence[Sequence[float]]]]
    """Layer names with ``coefficients[head][k]``; empty if a filter is no polynomial."""
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
            parts += ["## Coefficients", f"![coefficients of each head]({PICTURE})", self._table()]
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
            text = f"`{entry['kind']}` {_inline(settings)}"
            groups.setdefault(text, []).append(layer)
        rows = [(text, len(names), _span(names)) for text, names in groups.items()]
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
    """Layer names with their heads' coefficients; empty if a filter is no polynomial."""
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


def is_hub_name(name: str) -> bool:
    return _REPOSITORY.fullmatch(name) is not None


def check_results(results: Mapping[str, float | str] | None) -> None:
    if results is None:
        return
    if not isinstance(results, Mapping) or not all(
        isinstance(name, str) and isinstance(value, (int, float, str))
        for name, value in results.items()
    ):
        raise TypeError(
            f"results must be a dict of metric → number or text, such as {{'CoLA, Matthews': "
            f"0.61}}; got {results!r:.120}"
        )


def _range(column: Sequence[float]) -> str:
    if not column:
        return ""
    mean = sum(column) / len(column)
    return f"{mean:.4g} ({min(column):.4g} … {max(column):.4g})"


def _inline(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())


def _span(names: Sequence[str]) -> str:
    shown = [f"`{name}`" for name in names]
    return ", ".join(shown) if len(shown) <= 3 else f"{shown[0]} … {shown[-1]}"


def _code(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [_row(head), _row(["---"] * len(head)), *(_row(row) for row in rows)]
    return "\n".join(lines)


def _row(cells: Any) -> str:
    # a line break or a bar in a cell would end it
    shown = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(shown)} |"
