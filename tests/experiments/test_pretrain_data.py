"""The text of pretraining: how it is read, split, encoded, packed and refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gfsa_experiments.runs.run import carry_out
from gfsa_experiments.tasks.pretrain.recipe import PretrainTask
from support.tiny_pretraining import a_batch, a_run, built, document, write_corpus


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GFSA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data"))


def task_on(data: str, data_dir: Path, **settings: Any) -> PretrainTask:
    return built(data_dir, data=data, **settings)


def test_one_file_is_split_by_documents(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("\0".join(map(document, range(100))))
    task = task_on(str(tmp_path / "own.txt"), tmp_path)
    starts = {name: int((rows._host == task._end).sum()) for name, rows in task.rows.items()}
    assert sum(starts.values()) == 100
    assert 3 <= starts["valid"] <= 7
    assert 3 <= starts["test"] <= 7


def test_one_letter_makes_other_data(tmp_path: Path) -> None:
    """Rows are on the same data if all of the text is the same, not some of it."""
    text = "\0".join(map(document, range(100)))
    middle = text.index("\n", len(text) // 2)
    changed = f"{text[:middle]}.{text[middle:]}"
    digests = {}
    for name, content in (("a", text), ("b", text), ("c", changed)):
        (tmp_path / f"{name}.txt").write_text(content)
        own = task_on(str(tmp_path / f"{name}.txt"), tmp_path).own_data
        assert own is not None
        digests[name] = own.digest
    assert digests["a"] == digests["b"] != digests["c"]


def test_json_lines_in_a_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        lines = [json.dumps({"text": document(i), "id": i}) for i in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    task = task_on(str(tmp_path), tmp_path)
    assert sum(int((rows._host == task._end).sum()) for rows in task.rows.values()) == 120


def test_prepared_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(data)
    monkeypatch.setattr("gfsa_experiments.tasks.pretrain.data.prepare", None)
    built(data)


def test_packed_and_given_elsewhere(data: Path, tmp_path: Path) -> None:
    from gfsa_experiments.tasks.pretrain.prepare import main

    place = tmp_path / "elsewhere/techdocs"
    words = ["--data-dir", str(data), "--vocab-size", "300", "--pack", str(place)]
    main(words)
    there = built(tmp_path / "elsewhere")
    here = built(data)
    batch = a_batch(here)
    assert torch.equal(there.rows["train"].ids(batch), here.rows["train"].ids(batch))
    with pytest.raises(ValueError, match="vocab_size=300"):
        built(tmp_path / "elsewhere", vocab_size=400)
    (place / "test.bin.xz").write_bytes((place / "valid.bin.xz").read_bytes())
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setenv("GFSA_CACHE", str(tmp_path / "another"))
        with pytest.raises(ValueError, match="other tokens"):
            built(tmp_path / "elsewhere")


def test_a_tokenizer_of_ones_own(data: Path, tmp_path: Path) -> None:
    from gfsa_experiments.data.tokenizers import train_tokenizer

    train_tokenizer([document(i) for i in range(9)], 280).save(str(tmp_path / "t.json"))
    task = built(data, tokenizer=str(tmp_path / "t.json"))
    assert task.model.config.vocab_size == 320
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer"):
        built(data, tokenizer=str(tmp_path / "t.json"))


def test_a_finished_run_is_of_its_tokenizer(data: Path, tmp_path: Path) -> None:
    """Another file in its place gave the row of the former one."""
    from gfsa_experiments.data.tokenizers import train_tokenizer

    file = tmp_path / "t.json"
    texts = [document(i) for i in range(9)]
    train_tokenizer(texts, 280).save(str(file))
    run = a_run(data, tmp_path, max_steps=1, tokenizer=str(file))
    again = dataclasses.replace(run, resume=True)
    assert carry_out(run) == carry_out(again)
    train_tokenizer(texts, 290).save(str(file))
    with pytest.raises(ValueError, match="holds a run on other data"):
        carry_out(again)


def test_a_document_begins_where_the_text_says_so(tmp_path: Path) -> None:
    """As in texts that were made for GPT-2; they were counted as one document."""
    text = "<|endoftext|>\n".join(map(document, range(100)))
    (tmp_path / "own.txt").write_text(text)
    task = task_on(str(tmp_path / "own.txt"), tmp_path, boundaries=True)
    starts = [int((rows._host == task._end).sum()) for rows in task.rows.values()]
    assert sum(starts) > 99
    counts = "{} train, {} valid, {} test documents".format(*starts)
    assert str(task.own_data).endswith(f"{counts})")


def test_tokens_that_lost_their_end_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GFSA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own.txt").write_text("".join(map(document, range(50))))
    built(tmp_path, data="own.txt")
    (path,) = (tmp_path / "cache").glob("*/train.bin")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"train.bin has 1000 bytes .*; delete .*tokens-own"):
        built(tmp_path, data="own.txt")
