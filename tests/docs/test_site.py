"""Every public name has an entry in the reference, and an example that runs.

``make docs`` builds the site and fails on pages that the navigation leaves out, broken links and
anchors, and entries of names that do not exist.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import gfsa
from support.snippets import blocks_of

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PACKAGES = (
    "gfsa.filters",
    "gfsa.plugs",
    "gfsa.operators",
    "gfsa.lens",
    "gfsa_experiments.baselines",
    "gfsa_experiments.models",
)


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
    """None where a module needs a library at its top: such a name is in no ``__all__``."""
    if ".callbacks." in path or path.startswith(("gfsa.titan.", "gfsa.engines.")):
        return None
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", sorted(public_objects()))
def test_every_public_name_has_an_entry_with_an_example(name: str) -> None:
    wanted = public_objects()[name]
    # gfsa.plug and gfsa.plugs.plug are one object and need one entry
    pages = {page for path, page in entries().items() if lookup(path) is wanted}
    assert len(pages) == 1, f"{name} needs one entry '::: {name}' in docs/reference, has {pages}"
    (page,) = pages
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    code = "\n".join(block.code for block in blocks if block.runs)
    last = name.rpartition(".")[2]
    assert re.search(rf"\b{last}\b", code), f"{page.name} has no example that uses {last}"
