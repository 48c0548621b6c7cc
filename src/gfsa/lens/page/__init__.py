"""The report as one self-contained HTML page: a template, a style sheet and scripts, joined."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gfsa.lens.report import LensReport


def render(report: LensReport) -> str:
    """The page as text. It loads nothing, and its content security policy forbids it to."""
    # a "<" could end the script element that the data is in, or begin another
    data = json.dumps(report.to_plain(), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "style": _part("lens.css"),
        "script": "\n".join(_part(name) for name in ("plots.js", "lens.js")),
        "data": data,
        "title": html.escape(" and ".join(report.models)),
        "summary": _summary(report),
        "made": html.escape(f"gfsa {report.version}, {report.created}"),
        "data_name": f" Inputs: {html.escape(report.data)}." if report.data else "",
    }
    page = _part("lens.html")
    for name, text in parts.items():
        page = page.replace("{{" + name + "}}", text, 1)
    return page


def _summary(report: LensReport) -> str:
    """The findings of each model; readable without scripts, too."""
    cards = []
    for number, (name, sentences) in enumerate(report.findings.items()):
        model = report.models[name]
        facts = (
            f"{model.kind}, {model.parameters:,} parameters"
            f" ({model.filter_parameters:,} in filters); {model.samples:,} samples, "
            f"{model.tokens:,} tokens; {model.seconds['total']:.1f} s"
        )
        items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
        skipped = "".join(
            f"<li>{html.escape(where)}: {html.escape(why)}</li>"
            for where, why in model.skipped.items()
        )
        if skipped:
            items += f"<li>Not measured:<ul>{skipped}</ul></li>"
        cards.append(
            f'<article class="card summary" data-series="{number}"><h2>{html.escape(name)}</h2>'
            f'<p class="facts">{html.escape(facts)}</p><ul>{items}</ul></article>'
        )
    return "\n".join(cards)


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
