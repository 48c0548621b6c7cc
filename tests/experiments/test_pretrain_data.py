"""Pretraining: how text is read, split, encoded, packed and refused; probes of trained decoders."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gfsa_experiments.runs.run import carry_out
from gfsa_experiments.tasks.pretrain.data import TokenRows
from gfsa_experiments.tasks.pretrain.model import probe
from gfsa_experiments.tasks.pretrain.recipe import LanguageTask
from support.tiny_pretraining import a_run, built, document, write_corpus

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data"))


def task_on(data: str, data_dir: Path, **settings: Any) -> LanguageTask:
    return built(data_dir, data=data, **settings)


def test_one_file_is_split_by_documents(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("\0".join(map(document, range(100))))
    task = task_on(str(tmp_path / "own.txt"), tmp_path)
    starts = {name: int((rows._host == task.end).sum()) for name, rows in task.rows.items()}
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
    assert sum(int((rows._host == task.end).sum()) for rows in task.rows.values()) == 120


def test_prepared_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(data)
    monkeypatch.setattr("gfsa_experiments.tasks.pretrain.data.prepare", None)
    built(data)


def test_a_tokenizer_of_ones_own(data: Path, tmp_path: Path) -> None:
    from gfsa_experiments.data.pretrained import train_tokenizer

    train_tokenizer([document(i) for i in range(9)], 280).save(str(tmp_path / "t.json"))
    task = built(data, tokenizer=str(tmp_path / "t.json"))
    assert task.model.config.vocab_size == 320
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer"):
        built(data, tokenizer=str(tmp_path / "t.json"))


def test_a_finished_run_is_of_its_tokenizer(data: Path, tmp_path: Path) -> None:
    """Another file in its place gave the row of the former one."""
    from gfsa_experiments.data.pretrained import train_tokenizer

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
    task = task_on(str(tmp_path / "own.txt"), tmp_path)
    starts = [int((rows._host == task.end).sum()) for rows in task.rows.values()]
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
    (path.parent / "tokens.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokens.json is damaged; delete .*tokens-own"):
        built(tmp_path, data="own.txt")


VOCABULARY = 60
# so many that random tokens hardly repeat by chance
MANY = 4000


class Copies(nn.Module):
    """Predicts what followed the last occurrence of the present token, all else being equal."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor, **unused: Any) -> Any:
        logits = torch.zeros(*input_ids.shape, MANY)
        for row, tokens in enumerate(input_ids.tolist()):
            follows: dict[int, int] = {}
            for place, token in enumerate(tokens):
                if place:
                    follows[tokens[place - 1]] = token
                if token in follows:
                    logits[row, place, follows[token]] = 30.0
        return SimpleNamespace(logits=logits)


def rows_of(tokens: list[int] | Tensor, block: int) -> TokenRows:
    return TokenRows(np.asarray(tokens, dtype=np.uint16), block, "valid")


def test_tokens_too_many_for_a_device_come_with_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(65500, 65536))
    small = rows_of(tokens, 5)
    monkeypatch.setattr("gfsa_experiments.tasks.pretrain.data._MOST_ON_DEVICE", 1)
    large = rows_of(tokens, 5)
    batch = large.__getitems__([3, 0])
    assert "rows" not in batch
    assert torch.equal(large.ids(batch), small.ids(small.__getitems__([3, 0])))


@pytest.fixture
def text() -> TokenRows:
    numbers = torch.randint(MANY, (5 * 32 + 1,), generator=torch.Generator().manual_seed(1))
    numbers[-1] = MANY - 1
    return rows_of(numbers, 32)


def test_a_model_that_copies_is_seen_to_copy(text: TokenRows) -> None:
    found = probe(Copies(), text, None, rows=5)
    for name in ("induction", "recall"):
        assert found[name]["first"] > 0.8 * math.log(MANY), name
    assert found["induction"]["second"] < 0.1
    assert found["recall"]["second"] < 0.1


def test_losses_are_sorted_by_position() -> None:
    class Prefers(nn.Module):
        """Gives every token t the loss of logits −t at even places, equal logits at odd ones."""

        def __init__(self) -> None:
            super().__init__()
            self.number = nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: Tensor, **unused: Any) -> Any:
            logits = -torch.arange(VOCABULARY).float().expand(*input_ids.shape, VOCABULARY)
            return SimpleNamespace(logits=logits)

    valid = rows_of([*range(10, 50), 0], 20)
    found = probe(Prefers(), valid, None, rows=2)
    rest = math.log(sum(math.exp(-t) for t in range(VOCABULARY)))
    # 20 losses in a row: 1, 2, 4, 8 and 5 of them; tokens 11 … 30 and 31 … 49, 0
    assert len(found["position"]) == 5
    assert found["position"][0] == pytest.approx((11 + 31) / 2 + rest, rel=1e-5)
    assert found["position"][1] == pytest.approx((12.5 + 32.5) / 2 + rest, rel=1e-5)


@pytest.mark.parametrize("method", ["plain", "gfsa"])
def test_a_run_writes_its_probes(method: str, data: Path, tmp_path: Path) -> None:
    run = a_run(data, tmp_path, method, probes=3)
    row = carry_out(run)
    assert "probes" not in row.settings
    found = json.loads((run.folder / "probes.json").read_text())
    assert {*found} == {"induction", "recall", "position"}
