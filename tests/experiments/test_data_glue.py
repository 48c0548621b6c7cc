"""GLUE's files: every official layout, and what is said about bad ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gfsa_experiments.tasks.glue.recipe import TASKS, read_glue
from support.hub import HubPart, fake_hub
from support.tiny_texts import glue_label, glue_rows, sentence, write, write_glue

unofficial = pytest.mark.filterwarnings("ignore:.*results are not those of the official")


@unofficial
@pytest.mark.parametrize("name", TASKS)
def test_official_files(name: str, tmp_path: Path) -> None:
    folder = TASKS[name].folder
    write_glue(tmp_path, folder, train=7, dev=5)
    train, dev = read_glue(tmp_path, name)
    assert (len(train.labels), len(dev.labels)) == (7, 5)
    assert train.first == [sentence(i) for i in range(7)]
    if len(TASKS[name].texts) == 2:
        assert train.second == [sentence(i + 100) for i in range(7)]
    else:
        assert train.second is None
    expected = [glue_label(folder, i) for i in range(5)]
    classes = TASKS[name].labels
    assert dev.labels == [classes.index(e) if classes else float(e) for e in expected]


@unofficial
def test_one_compressed_file_a_split(tmp_path: Path) -> None:
    header = "question\tsentence\tlabel\n"
    write(tmp_path / "glue/qnli_train10k.tsv", header + "why ?\tso .\tentailment\n", True)
    write(tmp_path / "glue/qnli_dev.tsv", header + "who ?\tshe .\tnot_entailment\n", True)
    train, dev = read_glue(tmp_path, "qnli")
    assert (train.first, train.second, train.labels) == (["why ?"], ["so ."], [0])
    assert dev.labels == [1]


# what the hub calls its columns, and labels as it gives them
HUB: dict[str, tuple[tuple[str, ...], list[Any]]] = {
    "cola": (("sentence",), [0, 1]),
    "sst2": (("sentence",), [0, 1]),
    "mrpc": (("sentence1", "sentence2"), [0, 1]),
    "qqp": (("question1", "question2"), [0, 1]),
    "stsb": (("sentence1", "sentence2"), [3.8, 0.0]),
    "mnli": (("premise", "hypothesis"), [0, 1, 2]),
    "qnli": (("question", "sentence"), [0, 1]),
    "rte": (("sentence1", "sentence2"), [0, 1]),
}


def hub(monkeypatch: pytest.MonkeyPatch, bad: int = 0, rows: int = 6) -> list[tuple[str, ...]]:
    """The hub's GLUE; gives a list of what it will be asked for."""

    def load(repository: str, name: str, split: str) -> HubPart:
        columns, labels = HUB[name]
        texts = {
            column: [f" {split} {sentence(i + 100 * at)}" for i in range(rows)]
            for at, column in enumerate(columns)
        }
        answers = [-1] * bad + [labels[i % len(labels)] for i in range(bad, rows)]
        return HubPart(**texts, label=answers, idx=list(range(rows)))

    return fake_hub(monkeypatch, load)


@unofficial
@pytest.mark.parametrize("name", TASKS)
def test_without_files_the_hub_is_asked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = hub(monkeypatch)
    with pytest.warns(UserWarning, match=r"train.tsv.*Using nyu-mll/glue from the hub"):
        train, dev = read_glue(tmp_path, name)
    part = {"mnli-m": "validation_matched", "mnli-mm": "validation_mismatched"}
    task, split = name.split("-")[0], part.get(name, "validation")
    assert asked == [("nyu-mll/glue", task, "train"), ("nyu-mll/glue", task, split)]
    columns, labels = HUB[task]
    assert train.first == [f"train {sentence(i)}" for i in range(6)]
    assert dev.first[0] == f"{split} {sentence(0)}"
    assert (train.second is None) == (len(columns) == 1)
    if train.second is not None:
        assert train.second == [f"train {sentence(i + 100)}" for i in range(6)]
    assert train.labels == [labels[i % len(labels)] for i in range(6)]


@unofficial
def test_with_files_the_hub_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch)
    write_glue(tmp_path, "CoLA", train=4, dev=3)
    assert len(read_glue(tmp_path, "cola")[0].labels) == 4
    assert not asked


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*arguments: Any, **options: Any) -> Any:
        raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    message = r"CoLA/train.tsv.*gluebenchmark.com.*from the hub either: ConnectionError: no route"
    with pytest.raises(FileNotFoundError, match=message):
        read_glue(tmp_path, "cola")


@unofficial
@pytest.mark.parametrize(
    ("task", "folder", "row", "why"),
    [
        ("sst2", "SST-2", "fine\t2", "label '2' is none of 0, 1"),
        ("sst2", "SST-2", "fine", "expected 2 fields, got 1"),
        ("rte", "RTE", "1\ta\tb\tmaybe", "label 'maybe' is none of entailment"),
        ("rte", "RTE", "1\ta\t\tentailment", "a text is empty"),
        ("stsb", "STS-B", "1\t.\t.\t.\t1\t.\t.\ta\tb\t7.0", "score 7.0 is not between 0 and 5"),
        ("stsb", "STS-B", "1\t.\t.\t.\t1\t.\t.\ta\tb\tgood", "score 'good' is not a number"),
    ],
)
def test_bad_rows_are_counted_and_told(
    task: str, folder: str, row: str, why: str, tmp_path: Path
) -> None:
    write_glue(tmp_path, folder)
    rows = glue_rows(folder, 200)
    write(tmp_path / folder / "train.tsv", "\n".join([*rows[:50], row, *rows[50:]]))
    with pytest.warns(UserWarning, match=f"1 of 201 rows cannot be used; line 51: {why}"):
        train, _ = read_glue(tmp_path, task)
    assert len(train.labels) == 200
    write(tmp_path / folder / "train.tsv", "\n".join([*rows[:50], row]))
    read_glue.cache_clear()
    with pytest.raises(ValueError, match="More than 1 % of them are bad"):
        read_glue(tmp_path, task)
