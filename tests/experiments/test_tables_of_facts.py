"""The tables that tasks read their facts from, and files that are written whole."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from gfsa_experiments.data.sources import source_of, sources_of
from gfsa_experiments.engine.whole_files import write_text, write_whole
from gfsa_experiments.tasks import RECIPES, find_recipe
from gfsa_experiments.tasks.glue.data import TASKS
from gfsa_experiments.tasks.glue.recipe import GlueConfig
from gfsa_experiments.tasks.graph.data_sets import DataName


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


def test_every_graph_data_set_has_a_source() -> None:
    for name in get_args(DataName):
        assert source_of(f"graph {name}").name == name
        # the split of the two contests is made by whoever writes the file
        assert len(source_of(f"graph {name}").sizes) == (0 if name.startswith("pcqm4m") else 3)


def test_every_task_of_glue_is_a_setting() -> None:
    for name, facts in TASKS.items():
        GlueConfig(task=name).check()  # type: ignore[arg-type]
        assert len(facts.texts) in (1, 2)
        assert facts.train_rows > facts.dev_rows > 0


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
