"""Devign and BigCloneBench in the form of CodeXGLUE."""

from __future__ import annotations

from pathlib import Path

import pytest

from gfsa_experiments.tasks.code.recipe import read_code_set
from support.hub import HubPart, fake_hub
from support.tiny_texts import sentence, write_clones, write_devign

unofficial = pytest.mark.filterwarnings("ignore:.*results are not those of the official")


@pytest.fixture(autouse=True)
def _read_anew() -> None:
    read_code_set.cache_clear()


@unofficial
@pytest.mark.parametrize("folder", ["", "devign", "Defect-detection/dataset"])
def test_devign(folder: str, tmp_path: Path) -> None:
    write_devign(tmp_path / folder, train=8, others=3)
    found = read_code_set(tmp_path, "devign")
    assert {name: part.functions.shape for name, part in found.parts.items()} == {
        "train": (8, 1),
        "valid": (3, 1),
        "test": (3, 1),
    }
    assert found.parts["valid"].functions[:, 0].tolist() == [8, 9, 10]
    assert found.parts["valid"].labels.tolist() == [0, 1, 0]
    # white space of any kind is one blank
    assert found.code[8] == f"int f8 ( x ) {{ x = {sentence(8)} ; }}"


@unofficial
@pytest.mark.parametrize("shared", [False, True])
def test_clones(shared: bool, tmp_path: Path) -> None:
    write_clones(tmp_path / "bigclonebench", train=8, others=3, shared=shared)
    found = read_code_set(tmp_path, "bigclonebench")
    train = found.parts["train"]
    assert train.functions[:3].tolist() == [[0, 1], [1, 6], [2, 11]]
    assert train.labels[:3].tolist() == [0, 1, 0]
    assert len(found.code) == 12
    assert found.code[2] == f"void f2 ( ) {{ {sentence(2)} ; }}"


@pytest.mark.filterwarnings("ignore:.*results are not those of the official")
def test_without_files_the_hub_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(repository: str, split: str) -> HubPart:
        if "defect" in repository:
            functions = [f"int {split}( )  {{ {i} }}" for i in range(4)]
            return HubPart(func=functions, target=[True, False, True, False], project=["p"] * 4)
        ids = {"id1": [7, 8, 7], "id2": [8, 9, 9]}
        texts = {"func1": ["a", "b", "a"], "func2": ["b", f"c {split}", f"c  {split}"]}
        return HubPart(**ids, **texts, label=[True, False, True])

    asked = fake_hub(monkeypatch, load)
    with pytest.warns(UserWarning, match="Using google/code_x_glue_cc_defect"):
        devign = read_code_set(tmp_path, "devign")
    repository = "google/code_x_glue_cc_defect_detection"
    assert asked == [(repository, part) for part in ("train", "validation", "test")]
    assert devign.code[0] == "int train( ) { 0 }"
    assert devign.parts["valid"].functions.tolist() == [[4], [5], [6], [7]]
    assert devign.parts["test"].labels.tolist() == [1, 0, 1, 0]
    with pytest.warns(UserWarning, match="Using google/code_x_glue_cc_clone"):
        clones = read_code_set(tmp_path, "bigclonebench")
    # a function is kept once, whichever pairs it is in
    assert clones.code == ["a", "b", "c train", "c validation", "c test"]
    assert clones.parts["train"].functions.tolist() == [[0, 1], [1, 2], [0, 2]]
    assert clones.parts["test"].functions.tolist() == [[0, 1], [1, 4], [0, 4]]
    assert clones.parts["test"].labels.tolist() == [1, 0, 1]


@unofficial
@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("1001\t1002\t2", "two ids and a label of 0 or 1"),
        ("1001\t1002", "two ids and a label of 0 or 1"),
        ("1001\t9999\t1", "is not a function of data.jsonl"),
    ],
)
def test_bad_pairs(row: str, why: str, tmp_path: Path) -> None:
    write_clones(tmp_path, train=200)
    path = tmp_path / "train.txt"
    path.write_text(path.read_text() + row + "\n")
    with pytest.warns(UserWarning, match=f"1 of 201 rows cannot be used; line 201: .*{why}"):
        found = read_code_set(tmp_path, "bigclonebench")
    assert len(found.parts["train"].labels) == 200
    read_code_set.cache_clear()
    path.write_text("1000\t1001\t1\n" + row + "\n")
    with pytest.raises(ValueError, match="More than 1 % of them are bad"):
        read_code_set(tmp_path, "bigclonebench")
