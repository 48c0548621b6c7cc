"""The code recipe on tiny data and models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import gfsa
from gfsa_experiments.runs.methods import MethodConfig
from gfsa_experiments.runs.row import Row
from gfsa_experiments.runs.run import Run, carry_out
from gfsa_experiments.tasks.code.recipe import CodeConfig, CodeTask
from support.tiny_texts import save_model, write_clones, write_devign

pytestmark = pytest.mark.filterwarnings("ignore:.*results are not those of the official")
DATASETS = ("devign", "bigclonebench")
SMALL = CodeConfig(
    model="scratch",
    max_length=24,
    pad_to_multiple=8,
    depth=2,
    width=16,
    heads=2,
    vocab_size=300,
    batch_size=8,
    max_steps=3,
    tensorboard=False,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("code")
    write_devign(root / "devign")
    write_clones(root / "bigclonebench")
    return root


def built(data: Path, **settings: Any) -> CodeTask:
    config = dataclasses.replace(SMALL, **settings)
    config.check()
    torch.manual_seed(config.seed)
    task = CodeTask(config, data)
    task.model.eval()
    return task


def a_batch(task: CodeTask, indices: tuple[int, ...] = (0, 3, 5)) -> dict[str, torch.Tensor]:
    return task.splits["train"].dataset.__getitems__(list(indices))  # type: ignore[attr-defined]


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_filter_changes_nothing_to_begin_with(dataset: str, data: Path) -> None:
    plain, filtered = built(data, dataset=dataset), built(data, dataset=dataset)
    assert gfsa.plug(filtered.model).parameters == 12
    batch = a_batch(plain)
    loss = plain.loss(plain.model, batch)
    assert torch.equal(loss, filtered.loss(filtered.model, batch))
    loss.backward()
    assert all(p.grad is not None for p in plain.model.parameters())


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("kind", ["roberta", "plbart", "t5"])
def test_pretrained_models(kind: str, dataset: str, data: Path, tmp_path: Path) -> None:
    folder = str(save_model(tmp_path / kind, kind, torch.float16))
    task = built(data, dataset=dataset, model=folder)
    assert {p.dtype for p in task.model.parameters()} == {torch.float32}
    batch = a_batch(task)
    before = task.loss(task.model, batch)
    assert len(gfsa.plug(task.model).plugged) == (2 if kind == "roberta" else 4)
    assert torch.equal(before, task.loss(task.model, batch))
    # what fills up a batch is not seen
    wider = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (0, 8), value=1),
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, 8)),
        "labels": batch["labels"],
    }
    torch.testing.assert_close(before, task.loss(task.model, wider))


def test_a_decoder_is_read_at_the_last_end(data: Path, tmp_path: Path) -> None:
    task = built(data, model=str(save_model(tmp_path / "t5", "t5")))
    batch = a_batch(task)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    body = task.model.body
    states = body(
        input_ids=ids,
        attention_mask=mask,
        decoder_input_ids=body._shift_right(ids),
        decoder_attention_mask=mask,
    )[0]
    ends = [row.tolist().index(2) for row in ids]
    expected = torch.stack([state[end] for state, end in zip(states, ends, strict=True)])
    torch.testing.assert_close(task.model._vectors(ids, mask), expected)


def test_pairs_adjoin(data: Path) -> None:
    task = built(data, dataset="bigclonebench")
    batch = a_batch(task, (1, 2))
    dataset: Any = task.splits["train"].dataset
    assert batch["input_ids"].shape == (4, 24)
    first, second = dataset.rows[2]
    width = dataset.texts.ids.shape[1]
    assert batch["input_ids"][2, :width].tolist() == dataset.texts.ids[first].tolist()
    assert batch["input_ids"][3, :width].tolist() == dataset.texts.ids[second].tolist()
    lengths: Any = task.splits["train"].lengths
    assert lengths[2] == max(dataset.texts.lengths[[first, second]])
    # each pair is judged by itself
    both = task.model(batch["input_ids"], batch["attention_mask"])
    alone = task.model(batch["input_ids"][2:], batch["attention_mask"][2:])
    torch.testing.assert_close(both[1:], alone)


def test_functions_begin_and_end(data: Path) -> None:
    task = built(data, max_length=10)
    dataset: Any = task.splits["train"].dataset
    assert set(dataset.texts.ids[:, 0].tolist()) == {0}
    assert {
        row[n - 1] for row, n in zip(dataset.texts.ids, dataset.texts.lengths, strict=True)
    } == {2}
    assert dataset.texts.lengths.max() == 10


def test_metrics(data: Path) -> None:
    found, labels = torch.tensor([1, 0, 0, 1, 1]), torch.tensor([1, 1, 0, 0, 1])
    scores = built(data).score([(found[:2], labels[:2]), (found[2:], labels[2:])])
    # F1 of the ones is 2/3, of the zeros 1/2
    assert scores == pytest.approx({"accuracy": 60, "f1": 200 / 3, "macro_f1": 100 * 7 / 12})
    assert built(data).metric == "accuracy"
    assert built(data, dataset="bigclonebench").metric == "f1"


def trained(data: Path, out: Path, method: str, dataset: Any = "devign", **changes: Any) -> Row:
    run = Run(
        recipe="code",
        config=dataclasses.replace(
            SMALL, dataset=dataset, checkpoint_every=1, lens=method == "gfsa"
        ),
        method=method,
        options=MethodConfig(filter_lr=1e-2) if method == "gfsa" else MethodConfig(),
        data_dir=data,
        out=out,
        device="cpu",
    )
    return carry_out(dataclasses.replace(run, **changes))


@pytest.mark.parametrize("dataset", DATASETS)
def test_whole_runs(dataset: str, data: Path, tmp_path: Path) -> None:
    rows = {m: trained(data, tmp_path, m, dataset) for m in ("plain", "gfsa")}
    assert rows["plain"].task == f"{dataset} roberta-d2-w16"
    assert rows["plain"].valid is not None
    assert rows["gfsa"].added == 12
    assert rows["gfsa"].moved is not None
    assert rows["gfsa"].moved > 0
    assert len(list(tmp_path.rglob("lens.html"))) == 1
