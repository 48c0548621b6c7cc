"""Every Python snippet of the documentation and every example of a docstring runs.

The blocks of a page are run in order in one namespace, in a temporary directory, as a reader would
type them. A block that opens with ``````python no-run`````` is shown but not run. An example of a
docstring may use ``gfsa``, ``torch``, ``pathlib`` and ``model``, a small encoder without filters.
"""

from __future__ import annotations

import ast
import doctest
import linecache
import pathlib
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gfsa
from support.hub_server import hub_server
from support.snippets import Block, blocks_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run_page(name: str, page: str) -> int:
    """Run the blocks of a page one after another; returns how many there were."""
    # a module of its own, which dataclasses and pickle look up by name
    module = ModuleType("__page__")
    sys.modules["__page__"] = module
    namespace: dict[str, Any] = vars(module)
    blocks = [block for block in blocks_of(page) if block.runs]
    # tracebacks and inspect.getsource show the page itself
    linecache.cache[name] = (len(page), None, page.splitlines(keepends=True), name)
    for number, block in enumerate(blocks, start=1):
        try:
            tree = ast.parse(block.code, filename=name)
            ast.increment_lineno(tree, block.line - 1)
            exec(compile(tree, name, "exec"), namespace)
        except Exception as error:
            line = _failing_line(name, block, error)
            shown = page.splitlines()[line - 1].strip()
            raise AssertionError(
                f"{name}, block {number} of {len(blocks)}, line {line}: {shown}\n"
                f"{type(error).__name__}: {error}"
            ) from error
    return len(blocks)


def _failing_line(name: str, block: Block, error: Exception) -> int:
    if isinstance(error, SyntaxError) and error.filename == name:
        return block.line - 1 + (error.lineno or 1)
    line, traceback = block.line, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == name:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    # what a page uploads goes to a server of this machine
    with hub_server(tmp_path / "cache") if "push_to_hub" in text else nullcontext():
        run_page(str(page.relative_to(ROOT)), text)


NAMES = [name for name in gfsa.__all__ if ">>>" in (getattr(gfsa, name).__doc__ or "")]


def names_for_examples() -> dict[str, Any]:
    layer = torch.nn.TransformerEncoderLayer(d_model=16, nhead=4, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    return {"gfsa": gfsa, "torch": torch, "pathlib": pathlib, "model": model}


def run(name: str, docstring: str) -> doctest.TestResults:
    """Run the examples of one docstring; failures are printed."""
    test = doctest.DocTestParser().get_doctest(docstring, names_for_examples(), name, None, None)
    return doctest.DocTestRunner().run(test)


@pytest.mark.parametrize("name", NAMES)
def test_the_example_prints_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failed, attempted = run(name, getattr(gfsa, name).__doc__)
    assert attempted > 0
    assert failed == 0
