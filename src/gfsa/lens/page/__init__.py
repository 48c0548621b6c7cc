"""The report as one self-contained HTML page: a template, a style sheet and scripts, joined."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from gfsa.lens.colours import series_of
from gfsa.lens.readings import USUAL_SIMILARITY, ModelReading
from gfsa.lens.sentences import caption, rows
from gfsa.plugs.sites import grouped_reasons

if TYPE_CHECKING:
    from gfsa.lens.report import LensReport

# the question that the page answers, and what a reader has to know first
_OF_MODELS = (
    "Does it over-smooth, where, and what do the filters change?",
    "Attention averages tokens. Stacked deep enough, averaging makes tokens alike and fine detail "
    "is lost: that is over-smoothing. A graph filter lets a head pass what averaging removes. This "
    "page shows both, layer by layer.",
)
_OF_TRAJECTORIES = (
    "How did training move the filters?",
    "Each head has a graph filter: a polynomial of its attention map whose coefficients are "
    "learned. This page shows them over training, layer by layer and head by head; no model was "
    "measured.",
)

_SCRIPTS = ("plots.js", "lens.js", "trajectory.js", "tools.js")


def render(report: LensReport) -> str:
    """The page as text. It loads nothing, and its content security policy forbids it to."""
    # a "<" could end the script element that the data is in, or begin another
    data = json.dumps(_data(report), allow_nan=False).replace("<", "\\u003c")
    question, lead = _OF_MODELS if report.models else _OF_TRAJECTORIES
    parts = {
        "question": question,
        "lead": lead,
        "style": _part("lens.css"),
        "script": "\n".join(_part(name) for name in _SCRIPTS),
        "data": data,
        "title": html.escape(" and ".join(report.models or report.trajectories)),
        "headline": _headline(report),
        "looked": html.escape(_looked_at(report)),
        "summary": _summary(report),
        "tables": "\n".join(_table(model) for model in report.models.values()),
        "made": html.escape(", ".join(filter(None, (f"gfsa {report.version}", report.created)))),
    }
    # in one pass: a part may have another part's mark in it, as the name of a model
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _part("lens.html"))


def _data(report: LensReport) -> dict[str, Any]:
    """The report, the colour of each model, and trajectories by name in a list."""
    plain = report.to_plain()
    names = list(dict.fromkeys([*report.models, *report.trajectories]))
    colours = dict(zip(names, series_of(names), strict=True))
    plain["usual"] = {"similarity": USUAL_SIMILARITY}
    plain["series"] = [colours[name] for name in report.models]
    plain["trajectories"] = [
        {"name": name, "series": colours[name], **trajectory}
        for name, trajectory in plain["trajectories"].items()
        # a model without filters that learn has nothing to draw
        if trajectory["layers"]
    ]
    return plain


def _headline(report: LensReport) -> str:
    """The sentences that compare, then those that advise."""
    headline = report.headline
    lines = [f"<p>{html.escape(sentence)}</p>" for sentence in headline.compares]
    lines += [f'<p class="advice">{html.escape(sentence)}</p>' for sentence in headline.advises]
    return "\n".join(lines)


def _looked_at(report: LensReport) -> str:
    parts = []
    if report.models:
        parts.append(report.data or "inputs without a name (report.data gives them one)")
        extents: dict[str, list[str]] = {}
        for model in report.models.values():
            extents.setdefault(_extent(model), []).append(model.name)
        parts += [f"{', '.join(names)}: {extent}" for extent, names in extents.items()]
    for name, trajectory in report.trajectories.items():
        parts.append(
            f"{name} over training: {len(trajectory.steps)} records up to step "
            f"{trajectory.steps[-1] if trajectory.steps else 0}"
        )
    return f"Looked at: {'; '.join(parts)}."


def _extent(model: ModelReading) -> str:
    heads = sum(len(layer.coefficients) for layer in model.attention)
    text = f"{model.samples:,} samples, {model.tokens:,} tokens"
    if model.attention:
        text += f", {len(model.attention)} attention layers with {heads} heads"
    if model.spectral_samples:
        text += f", responses on {model.spectral_samples:,} samples"
    return text


def _summary(report: LensReport) -> str:
    """The findings of each model; readable without scripts, too."""
    cards = []
    colours = series_of(list(report.models))
    for number, (name, sentences) in zip(colours, report.findings.items(), strict=True):
        model = report.models[name]
        facts = (
            f"{model.kind}, {model.parameters:,} parameters"
            f" ({model.filter_parameters:,} in filters); {model.seconds:.1f} s"
        )
        items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
        skipped = "".join(
            f"<li>{html.escape(reason)}</li>" for reason in grouped_reasons(model.skipped)
        )
        if skipped:
            items += f"<li>Not measured:<ul>{skipped}</ul></li>"
        cards.append(
            f'<article class="card summary" data-series="{number}"><h2>{html.escape(name)}</h2>'
            f'<p class="facts">{html.escape(facts)}</p><ul>{items}</ul></article>'
        )
    return "\n".join(cards)


def _table(model: ModelReading) -> str:
    """The numbers of each layer."""
    names = {str(feature.depth): feature.name for feature in model.features if feature.depth}
    names |= {str(layer.depth): layer.name for layer in model.attention}
    headings, *layers = rows(model)
    for layer in layers:
        layer[0] = f"{layer[0]}  {names.get(layer[0], '')}"
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in headings)
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in layer) for layer in layers)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return (
        f'<div class="scroll"><table><caption>{html.escape(model.name)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<p class="note">{html.escape(caption(model))}</p>'
    )


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
