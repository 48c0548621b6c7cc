"""GLUE's files: every official layout, and what is said about bad ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gfsa_experiments.tasks.causal_lm.data import read_corpus
from gfsa_experiments.tasks.code.data import read_code_set
from gfsa_experiments.tasks.glue import recipe
from gfsa_experiments.tasks.glue.data import TASKS, read_glue
from support.hub import HubPart, fake_hub
from support.tiny_texts import glue_label, glue_rows, sentence, write, write_glue
from support.train_command import train as run_command

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
@pytest.mark.parametrize("where", ["", "glue", "glue_data", "CoLA itself"])
def test_the_folder_or_its_parent(where: str, tmp_path: Path) -> None:
    root = tmp_path if where == "CoLA itself" else tmp_path / where
    write_glue(root, "CoLA", train=4, dev=3)
    given = tmp_path / "CoLA" if where == "CoLA itself" else tmp_path
    assert len(read_glue(given, "cola")[0].labels) == 4


@unofficial
def test_one_compressed_file_a_split(tmp_path: Path) -> None:
    header = "question\tsentence\tlabel\n"
    write(tmp_path / "glue/qnli_train10k.tsv", header + "why ?\tso .\tentailment\n", True)
    write(tmp_path / "glue/qnli_dev.tsv", header + "who ?\tshe .\tnot_entailment\n", True)
    train, dev = read_glue(tmp_path, "qnli")
    assert (train.first, train.second, train.labels) == (["why ?"], ["so ."], [0])
    assert dev.labels == [1]


def test_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = r"CoLA/train.tsv.*gluebenchmark.com.*or pip install datasets"
    with pytest.raises(FileNotFoundError, match=message):
        read_glue(tmp_path, "cola")


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


@pytest.mark.filterwarnings("ignore:.*Using nyu-mll/glue")
def test_the_hub_is_checked_as_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, bad=1, rows=200)
    expected = "nyu-mll/glue cola train: 1 of 200 rows cannot be used; line 1: label '-1' is none"
    with pytest.warns(UserWarning, match="rows cannot be used") as told:
        read_glue(tmp_path, "cola")
    messages = [str(one.message) for one in told]
    assert any(expected in message for message in messages)
    assert any("train has 199 usable rows, the official file 8,551" in m for m in messages)
    monkeypatch.setitem(HUB, "cola", (("text",), [0]))
    read_glue.cache_clear()
    with pytest.raises(ValueError, match="should have the columns sentence, label, it has text"):
        read_glue(tmp_path, "cola")


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*arguments: Any, **options: Any) -> Any:
        raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    message = r"CoLA/train.tsv.*gluebenchmark.com.*from the hub either: ConnectionError: no route"
    with pytest.raises(FileNotFoundError, match=message):
        read_glue(tmp_path, "cola")


def test_the_hub_is_not_asked_for_a_folder_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = hub(monkeypatch)
    nowhere = tmp_path / "nowhere"
    readers: list[Callable[[], object]] = [
        lambda: read_glue(nowhere, "cola"),
        lambda: read_corpus(nowhere, "wikitext-2", "train"),
        lambda: read_code_set(nowhere, "devign"),
    ]
    for read in readers:
        with pytest.raises(FileNotFoundError, match=r"nowhere does not exist\. .*--data-dir"):
            read()
    assert not asked


@unofficial
@pytest.mark.filterwarnings("ignore:.*Using nyu-mll/glue")
def test_the_default_folder_need_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch)
    monkeypatch.chdir(tmp_path)
    read_glue.cache_clear()
    read_glue(Path("data"), "cola")
    read_glue.cache_clear()
    assert asked


def test_missing_data_is_noticed_before_a_model_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("the model came first")

    monkeypatch.setattr(recipe, "load_classifier", fetched)
    code, output = run_command(tmp_path, "glue", "--data-dir", str(tmp_path / "nowhere"))
    assert code == 1
    assert "nowhere does not exist" in " ".join(output.split())


def test_damaged_file(tmp_path: Path) -> None:
    path = write(tmp_path / "cola_train.tsv", "sentence\tlabel\na\t1\n", compressed=True)
    write(tmp_path / "cola_dev.tsv", "sentence\tlabel\na\t1\n")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"cola_train.tsv.xz is damaged"):
        read_glue(tmp_path, "cola")


def test_another_file(tmp_path: Path) -> None:
    write_glue(tmp_path, "RTE")
    write(tmp_path / "RTE/train.tsv", "\n".join(glue_rows("SST-2", 3)))
    with pytest.raises(ValueError, match="is not RTE: its first line should name the columns"):
        read_glue(tmp_path, "rte")


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
