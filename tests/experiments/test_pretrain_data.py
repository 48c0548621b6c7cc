"""The text of pretraining: how it is read, split, encoded, packed and refused."""

from __future__ import annotations

import dataclasses
import gzip
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


def test_one_long_document_is_cut_at_lines(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(map(document, range(200))))
    task = task_on(str(tmp_path / "book.txt"), tmp_path)
    assert all(int((rows._host == task._end).sum()) == 1 for rows in task.rows.values())


def test_files_of_a_folder_are_documents_however_few(tmp_path: Path) -> None:
    """Thirty files were glued to one document a part, and boundaries had no effect."""
    for number in range(30):
        (tmp_path / f"{number:02d}.md").write_text(document(number))
    whole = task_on(str(tmp_path), tmp_path)
    starts = [int((rows._host == whole._end).sum()) for rows in whole.rows.values()]
    assert sum(starts) in (30, 31, 32)
    assert starts[0] >= 26
    apart = task_on(str(tmp_path), tmp_path, boundaries=True)
    batch = a_batch(whole)
    with torch.no_grad():
        losses = [task.loss(task.model, batch) for task in (whole, apart)]
    assert not torch.equal(*losses)


@pytest.mark.parametrize("boundaries", [False, True])
def test_a_single_document_is_told(boundaries: bool, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(map(document, range(200))))
    task = task_on(str(tmp_path / "book.txt"), tmp_path, boundaries=boundaries)
    said = str(task.own_data)
    assert "1 train, 1 valid, 1 test documents" in said
    assert ("boundaries change nothing in train, valid, test" in said) == boundaries


def test_tokens_of_an_earlier_split_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only of text without named parts: what was prepared of techdocs is found again."""
    from gfsa_experiments.data.corpus import read_corpus
    from gfsa_experiments.tasks.pretrain import tokens

    (tmp_path / "own.txt").write_text("".join(map(document, range(50))))
    named = write_corpus(tmp_path) / "techdocs"
    corpora = [read_corpus(named), read_corpus(tmp_path / "own.txt")]
    choice = tokens.TokenizerChoice("", 300)
    before = [tokens._key(corpus, choice) for corpus in corpora]
    monkeypatch.setattr(tokens, "_SPLIT", tokens._SPLIT + 1)
    after = [tokens._key(corpus, choice) for corpus in corpora]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False]


def test_prepared_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(data)
    monkeypatch.setattr("gfsa_experiments.tasks.pretrain.tokens.prepare", None)
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


@pytest.mark.parametrize("given", [True, False])
def test_what_the_error_says_about_packed_tokens_works(
    given: bool, data: Path, tmp_path: Path
) -> None:
    """It led from one error to the same one."""
    from gfsa_experiments.data.tokenizers import train_tokenizer
    from gfsa_experiments.tasks.pretrain.prepare import main

    place = tmp_path / "elsewhere/techdocs"
    words = ["--data-dir", str(data), "--pack", str(place)]
    # the text has fewer tokens than are asked for
    words += ["--tokenizer", str(tmp_path / "t.json")] if given else ["--vocab-size", "9000"]
    train_tokenizer([document(i) for i in range(9)], 280).save(str(tmp_path / "t.json"))
    main(words)
    with pytest.raises(ValueError, match=r"; set .*, or data=") as caught:
        built(place.parent)
    hint = str(caught.value).partition("; set ")[2].partition(", or data=")[0]
    name, _, value = hint.partition("=")
    settings: dict[str, Any] = {name: value if given else int(value)}
    assert len(built(place.parent, **settings).rows["test"])


def test_a_tokenizer_of_ones_own(data: Path, tmp_path: Path) -> None:
    from gfsa_experiments.data.tokenizers import train_tokenizer

    train_tokenizer([document(i) for i in range(9)], 280).save(str(tmp_path / "t.json"))
    task = built(data, tokenizer=str(tmp_path / "t.json"))
    assert task.model.config.vocab_size == 320
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer"):
        built(data, tokenizer=str(tmp_path / "t.json"))


def test_a_tokenizer_that_was_saved_for_short_texts(data: Path, tmp_path: Path) -> None:
    """Its file says where to cut and how to fill a text; documents lost their ends."""
    from gfsa_experiments.data.tokenizers import train_tokenizer

    tokenizer = train_tokenizer([document(i) for i in range(9)], 280)
    tokenizer.save(str(tmp_path / "whole.json"))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=500)
    tokenizer.save(str(tmp_path / "short.json"))
    tasks = [built(data, tokenizer=str(tmp_path / f"{n}.json")) for n in ("whole", "short")]
    assert torch.equal(*(task.rows["test"]._host for task in tasks))


def test_a_tokenizer_that_leaves_numbers_out(data: Path, tmp_path: Path) -> None:
    """Numbers above the count of tokens were cut to 16 bits."""
    from gfsa_experiments.data.tokenizers import train_tokenizer

    train_tokenizer([document(i) for i in range(9)], 280).save(str(tmp_path / "t.json"))
    written = json.loads((tmp_path / "t.json").read_text())
    written["model"]["vocab"]["Ġ"] = 70_000
    (tmp_path / "t.json").write_text(json.dumps(written))
    task = built(data, tokenizer=str(tmp_path / "t.json"))
    assert int(task.rows["test"].ids(a_batch(task, "test")).max()) == 70_000
    assert task.model.config.vocab_size > 70_000


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
    with pytest.raises(ValueError, match="finished run on other data"):
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


def test_blank_lines_of_json_are_no_documents(tmp_path: Path) -> None:
    for part in ("train", "valid", "test"):
        lines = [json.dumps({"text": text}) for text in (document(1), "", " \n", document(2))]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))
    task = task_on(str(tmp_path), tmp_path)
    assert [int((rows._host == task._end).sum()) for rows in task.rows.values()] == [2] * 3


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("x.jsonl", '{"txt": "a"}', "x.jsonl, line 1: .*text is a string, got the keys txt"),
        ("x.jsonl", "{", "x.jsonl, line 1: expected a JSON object"),
        ("x.jsonl", '{"text": "a\\ud83d"}', "line 1: .*half of a pair, at character 1 of"),
        ("x.jsonl", '{"text": null}', "key text is a string, got null there; leave the line"),
        ("x.txt.xz", "no xz", "damaged"),
        ("x.txt", "short", "too little text"),
        ("x.txt", "", "has no text in it"),
        ("x.txt", "word", "4 characters in 1 document;"),
        ("x.pdf", "%PDF", "no text to read"),
        ("x.py", "import os", "end in .txt.* or data= to one file, which is read whatever"),
        ("train.txt", "text " * 100, "none for valid, test"),
    ],
)
def test_bad_input_says_what_is_wrong(name: str, content: str, error: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=error):
        built(tmp_path, data=str(tmp_path))


def test_packed_in_another_way(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(ValueError, match=r"Unpack it; \.xz and \.gz are read packed"):
        built(tmp_path, data="x.jsonl.zst")
    (tmp_path / "X.TXT.GZ").write_bytes(gzip.compress(document(1).encode() * 50))
    assert len(built(tmp_path, data="X.TXT.GZ").rows["train"])


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no techdocs in"):
        built(tmp_path)
    (tmp_path / "techdocs.txt").write_text("text")
    with pytest.raises(FileNotFoundError, match="no such file"):
        built(tmp_path, data="techdocs.txt", tokenizer="nowhere.json")
