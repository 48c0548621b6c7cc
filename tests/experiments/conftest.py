"""What the tests of the experiments share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _read_anew() -> Iterator[None]:
    """Forget the data that was read: the next test may have other files in the same place."""
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith(("gfsa_experiments.tasks", "gfsa_experiments.data")):
            for member in vars(module).values():
                if hasattr(member, "cache_clear"):
                    member.cache_clear()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the tests of a module keep prepared corpora."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GFSA_CACHE", str(folder))
        yield folder
