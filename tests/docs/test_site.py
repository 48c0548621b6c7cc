"""The site has every page and every public name, and no page uses another name of gfsa."""

from __future__ import annotations

import functools
import importlib
import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import gfsa
from support.snippets import blocks_of

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
PACKAGES = (
    "gfsa.filters",
    "gfsa.plugs",
    "gfsa.operators",
    "gfsa.lens",
    "gfsa_experiments.baselines",
    "gfsa_experiments.models",
)
# what docs/site/hooks.py takes into the site
PAGES = ("*.md", "benchmarks/README.md", "docs/**/*.md", "results/*.md")


def config() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def pages_of(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for inside in entry.values():
                yield from pages_of(inside if isinstance(inside, list) else [inside])


def test_the_navigation_names_every_page_once() -> None:
    named = list(pages_of(config()["nav"]))
    there = {path.relative_to(ROOT).as_posix() for glob in PAGES for path in ROOT.glob(glob)}
    assert len(named) == len(set(named))
    assert set(named) == there


def anchor_on_github(heading: str) -> str:
    return re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-")


def anchor_on_site(heading: str) -> str:
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page that lead to the same heading on GitHub and on the site."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    texts = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).strip() for heading in headings]
    return {
        anchor_on_site(text) for text in texts if anchor_on_site(text) == anchor_on_github(text)
    }


def test_links_to_headings_lead_there_on_github_and_on_the_site() -> None:
    missing, seen = [], 0
    for page in sorted(path for glob in PAGES for path in ROOT.glob(glob)):
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([\w./-]*)#([^)\s]+)\)", text):
            there = (page.parent / target).resolve() if target else page
            if there.suffix == ".md":
                seen += 1
                if anchor not in anchors_of(there):
                    missing.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert seen > 10
    assert not missing


def test_no_two_rows_are_about_the_same_model() -> None:
    page = (ROOT / "docs" / "supported.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[:2] for line in page.splitlines() if line.startswith("| ")]
    named = [" ".join(row) for row in rows]
    assert len(named) > 500
    assert sorted(named) == sorted(set(named))


def public_objects() -> dict[str, Any]:
    """Every public name and what it is."""
    found = {f"gfsa.{name}": getattr(gfsa, name) for name in gfsa.__all__}
    for package in PACKAGES:
        module = importlib.import_module(package)
        found |= {f"{package}.{name}": getattr(module, name) for name in module.__all__}
    del found["gfsa.__version__"]
    return found


def entries() -> dict[str, Path]:
    """The names that have an entry in the reference, and their pages."""
    found: dict[str, Path] = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert name not in found, f"{name} has two entries"
            found[name] = page
    return found


def lookup(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gfsa"):
            # the entry is wrong: gfsa has no such module
            raise
        pytest.skip(f"{module} needs a library that is not installed")


@pytest.mark.parametrize("name", sorted(public_objects()))
def test_every_public_name_has_an_entry_with_an_example(name: str) -> None:
    wanted = public_objects()[name]
    # gfsa.plug and gfsa.plugs.plug are one object and need one entry
    pages = {page for path, page in entries().items() if lookup_core(path) is wanted}
    assert len(pages) == 1, f"{name} needs one entry '::: {name}' in docs/reference, has {pages}"
    (page,) = pages
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    code = "\n".join(block.code for block in blocks if block.runs)
    last = name.rpartition(".")[2]
    assert re.search(rf"\b{last}\b", code), f"{page.name} has no example that uses {last}"


def needs_framework(path: str) -> bool:
    """Whether an entry's module imports its library at its top; it is in no ``__all__`` then."""
    return ".callbacks." in path or path.startswith(("gfsa.titan.", "gfsa.engines."))


def lookup_core(path: str) -> Any:
    return None if needs_framework(path) else lookup(path)


@pytest.mark.parametrize("name", sorted(name for name in entries() if not needs_framework(name)))
def test_an_entry_that_has_the_name_of_its_module_is_spelt_out(name: str) -> None:
    found = lookup(name)
    home = getattr(found, "__module__", "")
    if home.rpartition(".")[2] == getattr(found, "__name__", None):
        # read statically, gfsa.plugs.plug is the module, not the function
        assert name == f"{home}.{found.__name__}"


@pytest.mark.parametrize("name", sorted(entries()))
def test_every_entry_exists_and_has_a_docstring(name: str) -> None:
    found = lookup(name)
    # METHODS is a dictionary, described by the class of its values
    assert isinstance(found, dict) or found.__doc__


TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted(
    path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".ipynb")
)
OURS = r"gfsa(?:_experiments)?"
# what looks like a name and is none: a file, the group of entry points, ends of state-dict keys
NO_NAMES = {"gfsa.py", "gfsa.commands", "gfsa.theta", "gfsa._extra_state"}

_IMPORT = re.compile(rf"^\s*from ({OURS}[\w.]*) import (\([^)]*\)|[^\n#]+)", re.MULTILINE)
# not behind a full stop, a slash or a star (a key of a state dict, a path), nor behind -m
_DOTTED = re.compile(rf"(?<![\w./*-])(?<!-m )({OURS}(?:\.\w+)+)")


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
def named_by(path: str) -> Any:
    """What a dotted path names; None if it cannot be imported here."""
    module, _, name = path.rpartition(".")
    if not module:
        return None
    try:
        owner = importlib.import_module(module)
    except ImportError:
        # gfsa.models and gfsa.baselines are names of gfsa, not modules of it
        owner = named_by(module)
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
    same = {id(found) for found in map(named_by, covered()) if found is not None}
    return sorted(n for n in names - known if named_by(n) is None or id(named_by(n)) not in same)


def test_every_name_in_pages_and_examples_is_covered() -> None:
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in (*TEXTS, *EXAMPLES)
        if (found := uncovered(names_in(text_of(path))))
    }
    assert not wrong


def test_a_name_of_the_policy_exists() -> None:
    for name in covered():
        if name.startswith("gfsa_experiments."):
            assert named_by(name) is not None, name
