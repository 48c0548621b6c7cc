"""The report as one self-contained HTML page: a template, a style sheet and scripts, joined."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from typing import TYPE_CHECKING

from gfsa.lens.colours import series_of
from gfsa.lens.readings import ModelReading
from gfsa.lens.sentences import USUAL_SIMILARITY, caption, rows
from gfsa.plugs.sites import grouped_reasons

if TYPE_CHECKING:
    from gfsa.lens.report import LensReport

_SCRIPTS = ("plots.js", "lens.js", "tools.js")


def render(report: LensReport) -> str:
    """The page as text. It loads nothing, and its content security policy forbids it to."""
    data = report.to_plain() | {
        "usual": {"similarity": USUAL_SIMILARITY},
        "series": series_of(list(report.models)),
    }
    inputs = report.data or "inputs without a name (report.data gives them one)"
    parts = {
        "style": _part("lens.css"),
        "script": "\n".join(_part(name) for name in _SCRIPTS),
        # a "<" could end the script element that the data is in, or begin another
        "data": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "title": html.escape(" and ".join(report.models)),
        "headline": _headline(report),
        "inputs": html.escape(inputs),
        "summary": _summary(report),
        "tables": "\n".join(_table(model) for model in report.models.values()),
        "made": html.escape(", ".join(filter(None, (f"gfsa {report.version}", report.created)))),
    }
    # in one pass: a part may have another part's mark in it, as the name of a model
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _part("lens.html"))


def _headline(report: LensReport) -> str:
    """The sentences that compare, then those that advise."""
    compares, advises = report.headline
    lines = [f"<p>{html.escape(sentence)}</p>" for sentence in compares]
    lines += [f'<p class="advice">{html.escape(sentence)}</p>' for sentence in advises]
    return "\n".join(lines)


def _facts(model: ModelReading) -> str:
    heads = sum(len(layer.coefficients) for layer in model.attention)
    return (
        f"{model.kind}, {model.parameters:,} parameters ({model.filter_parameters:,} in filters); "
        f"{len(model.attention)} attention layers with {heads} heads on {model.samples:,} samples, "
        f"{model.tokens:,} tokens (responses on {model.spectral_samples:,} samples); "
        f"{model.seconds:.1f} s"
    )


def _summary(report: LensReport) -> str:
    """The findings of each model; readable without scripts, too."""
    cards = []
    colours = series_of(list(report.models))
    for number, (name, sentences) in zip(colours, report.findings.items(), strict=True):
        model = report.models[name]
        items = _items(sentences)
        if model.skipped:
            items += f"<li>Not measured:<ul>{_items(grouped_reasons(model.skipped))}</ul></li>"
        cards.append(
            f'<article class="card summary" data-series="{number}"><h2>{html.escape(name)}</h2>'
            f'<p class="facts">{html.escape(_facts(model))}</p><ul>{items}</ul></article>'
        )
    return "\n".join(cards)


def _items(texts: list[str]) -> str:
    return "".join(f"<li>{html.escape(text)}</li>" for text in texts)


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
