"""Docstrings are written for readers of the code, with a few marks of reStructuredText.

This extension of Griffe turns the marks into Markdown for the site: roles become links or formulas,
``.. math::`` a formula of its own line, ``.. code-block::`` a fenced block.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import latex2mathml.converter
from griffe import AliasResolutionError, Extension, NameResolutionError, Object

# functions that have the name of their module: a path that is read statically means the module
SHADOWED = {
    "gfsa.plug": "gfsa.plugs.api.plug",
    "gfsa.prune": "gfsa.plugs.prune.prune",
    "gfsa.plugs.sites": "gfsa.plugs.sites.sites",
    "gfsa.baselines.apply": "gfsa_experiments.baselines.apply.apply",
}
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`(?P<name>[^`]+)`")
_MATH = re.compile(r":math:`(?P<formula>[^`]+)`")
_BLOCK = re.compile(
    r"^(?P<indent> *)\.\. (?P<kind>math|code-block)::(?P<argument>[^\n]*)\n"
    r"(?P<body>(?:(?P=indent) +[^\n]*\n?|\s*\n)*)",
    re.MULTILINE,
)


class Docstrings(Extension):
    """Rewrites every docstring before it is parsed into sections."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value, obj)


def to_markdown(text: str, owner: Object) -> str:
    text = _BLOCK.sub(_fence, text)
    text = _MATH.sub(_formula, text)
    return _ROLE.sub(lambda match: _link(match["name"], owner), text)


def _fence(match: re.Match[str]) -> str:
    argument = match["argument"].strip()
    body = textwrap.dedent(match["body"]).strip("\n")
    if match["kind"] == "math":
        language, body = "math", f"{argument}\n{body}".strip()
    else:
        language = argument
    fenced = f"```{language}\n{body}\n```\n\n"
    return textwrap.indent(fenced, match["indent"])


def _formula(match: re.Match[str]) -> str:
    # in a span: Markdown takes a formula at the beginning of a line for a block of its own
    formula = re.sub(r"\s+", " ", match["formula"])
    return f'<span class="formula">{latex2mathml.converter.convert(formula)}</span>'


def _link(name: str, owner: Object) -> str:
    """A link to a name's entry in the reference, or the name alone where it has none."""
    short = name.startswith("~")
    name = name.removeprefix("~")
    shown = name.rpartition(".")[2] if short else name
    return f'<autoref optional identifier="{_path_of(name, owner)}"><code>{shown}</code></autoref>'


def _path_of(name: str, owner: Object) -> str:
    if name.startswith(("gfsa.", "gfsa_experiments.", "torch.")):
        return SHADOWED.get(name, name)
    try:
        return owner.resolve(name)
    except (NameResolutionError, AliasResolutionError):
        return name
