"""The examples in docstrings of the public names run and print what they say.

An example may use ``gfsa``, ``torch``, ``pathlib`` and ``model``, a small encoder without filters.
"""

from __future__ import annotations

import doctest
import pathlib
from pathlib import Path
from typing import Any

import pytest
import torch

import gfsa

NAMES = [name for name in gfsa.__all__ if ">>>" in (getattr(gfsa, name).__doc__ or "")]
# where a reader begins; FilterRate has its example in docs/reference/plugs.md
MAIN = {
    "GFSA",
    "Polynomial",
    "diagnose",
    "graph_filter_attention",
    "load",
    "parameter_groups",
    "plug",
    "save",
    "unplug",
}


def names_for_examples() -> dict[str, Any]:
    layer = torch.nn.TransformerEncoderLayer(d_model=16, nhead=4, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    return {"gfsa": gfsa, "torch": torch, "pathlib": pathlib, "model": model}


def run(name: str, docstring: str) -> doctest.TestResults:
    """Run the examples of one docstring; failures are printed."""
    test = doctest.DocTestParser().get_doctest(docstring, names_for_examples(), name, None, None)
    return doctest.DocTestRunner().run(test)


def test_the_main_names_have_an_example() -> None:
    assert set(NAMES) >= MAIN


@pytest.mark.parametrize("name", NAMES)
def test_the_example_prints_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failed, attempted = run(name, getattr(gfsa, name).__doc__)
    assert attempted > 0
    assert failed == 0
