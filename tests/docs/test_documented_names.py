"""Every name of gfsa that a page or an example uses is one that the deprecation policy covers."""

from __future__ import annotations

import functools
import importlib
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted(
    path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".ipynb")
)
PACKAGES = r"gfsa(?:_experiments)?"
# what looks like a name and is none: a file, the group of entry points, ends of state-dict keys
NO_NAMES = {"gfsa.py", "gfsa.commands", "gfsa.theta", "gfsa._extra_state"}

_IMPORT = re.compile(rf"^\s*from ({PACKAGES}[\w.]*) import (\([^)]*\)|[^\n#]+)", re.MULTILINE)
# not behind a full stop, a slash or a star (a key of a state dict, a path), nor behind -m
_DOTTED = re.compile(rf"(?<![\w./*-])(?<!-m )({PACKAGES}(?:\.\w+)+)")


def text_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def names_in(text: str) -> set[str]:
    """The names that a text imports, and those that it writes with dots."""
    found = set(_DOTTED.findall(text)) - NO_NAMES
    for module, names in _IMPORT.findall(text):
        words = names.strip("()").split(",")
        found |= {f"{module}.{word.split()[0]}" for word in words if word.strip()}
    return found


@functools.cache
def covered() -> frozenset[str]:
    """The names with an entry in the reference, and those of the policy itself."""
    policy = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Deprecation")[2]
    policy = policy.partition("\n## ")[0]
    found = set(re.findall(r"`(gfsa_experiments\.[\w.]+)`", policy))
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        found |= set(re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE))
    return frozenset(found)


@functools.cache
def lookup(path: str) -> Any:
    """What a dotted path names; None if it cannot be imported here."""
    module, _, name = path.rpartition(".")
    if not module:
        return None
    try:
        owner = importlib.import_module(module)
    except ImportError:
        # gfsa.models and gfsa.baselines are names of gfsa, not modules of it
        owner = lookup(module)
    return getattr(owner, name, None)


def uncovered(names: set[str]) -> list[str]:
    """Those of the names that the policy does not cover."""
    known = covered() | {"gfsa.__version__", "gfsa.__all__"}
    # modules with covered names in them
    known |= {path.rpartition(".")[0] for path in known} | {
        "gfsa.filters",
        "gfsa.models",
        "gfsa.baselines",
    }
    # gfsa.plug and gfsa.plugs.api.plug are one object
    same = {id(found) for found in map(lookup, covered()) if found is not None}
    return sorted(n for n in names - known if lookup(n) is None or id(lookup(n)) not in same)


def test_every_name_in_pages_and_examples_is_covered() -> None:
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in (*PAGES, *EXAMPLES)
        if (found := uncovered(names_in(text_of(path))))
    }
    assert not wrong


def test_a_name_of_the_policy_exists() -> None:
    for name in covered():
        if name.startswith("gfsa_experiments."):
            assert lookup(name) is not None, name
