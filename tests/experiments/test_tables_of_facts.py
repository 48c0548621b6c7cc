"""The tables that tasks read their facts from, and files that are written whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from gfsa_experiments.data.sources import sources_of
from gfsa_experiments.engine.whole_files import write_text, write_whole
from gfsa_experiments.tasks import RECIPES, find_recipe


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "pretrain"])
def test_every_recipe_names_its_data(name: str) -> None:
    sources = find_recipe(name).sources
    assert sources == sources_of(name)
    assert sources
    for source in sources:
        assert source.name
        assert source.files
        assert source.where
        assert source.folders[0] == ""


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "numbers.txt"
    write_text(path, "1\r\n2\n")
    assert path.read_bytes() == b"1\r\n2\n"

    def fails(file: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, fails)
    assert path.read_bytes() == b"1\r\n2\n"
    assert list(path.parent.iterdir()) == [path]
