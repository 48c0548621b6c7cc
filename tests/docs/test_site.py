"""The site has every page and every public name; ``make docs`` builds it and checks its links."""

from __future__ import annotations

import importlib
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
