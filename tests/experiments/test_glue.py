"""The GLUE recipe on tiny data and models."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import gfsa
from gfsa_experiments.data.token_batches import hold_out
from gfsa_experiments.runs.methods import MethodConfig
from gfsa_experiments.runs.row import Row
from gfsa_experiments.runs.run import Run, carry_out
from gfsa_experiments.tasks.glue.recipe import GlueConfig, GlueTask
from support.tiny_texts import save_model, write_glue

pytestmark = pytest.mark.filterwarnings("ignore:.*results are not those of the official")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "tiny-bert", "bert"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("glue")
    for folder in ("CoLA", "STS-B", "MRPC"):
        write_glue(root, folder)
    return root


def config_for(model: str, **settings: Any) -> GlueConfig:
    small: dict[str, Any] = {"max_steps": 3, "batch_size": 8, "pad_to_multiple": 4}
    return GlueConfig(model=model, tensorboard=False, **(small | settings))


def built(config: GlueConfig, data: Path) -> GlueTask:
    config.check()
    torch.manual_seed(config.seed)
    task = GlueTask(config, data)
    task.model.eval()
    return task


def a_batch(task: GlueTask, split: str = "train") -> dict[str, torch.Tensor]:
    return task.splits[split].dataset.__getitems__([0, 3, 5])  # type: ignore[attr-defined]


@pytest.mark.parametrize("task", ["cola", "stsb", "mrpc"])
def test_a_filter_changes_nothing_to_begin_with(task: str, bert: str, data: Path) -> None:
    config = config_for(bert, task=task)
    plain, filtered = built(config, data), built(config, data)
    assert gfsa.plug(filtered.model).parameters
    batch = a_batch(plain)
    loss = plain.loss(plain.model, batch)
    assert torch.equal(loss, filtered.loss(filtered.model, batch))
    loss.backward()
    assert all(p.grad is not None for p in plain.model.parameters())


def test_the_seed_decides_the_head_alone(bert: str, data: Path) -> None:
    first, second = (built(config_for(bert, seed=seed), data).model for seed in (0, 1))
    same = {n: torch.equal(p, second.state_dict()[n]) for n, p in first.state_dict().items()}
    assert {name for name, equal in same.items() if not equal} == {"classifier.weight"}


def test_batches_are_padded_to_a_multiple(bert: str, data: Path) -> None:
    task = built(config_for(bert, task="mrpc", pad_to_multiple=8), data)
    batch = a_batch(task)
    assert batch["input_ids"].shape[1] % 8 == 0
    lengths = torch.tensor(task.splits["train"].lengths)[[0, 3, 5]]
    assert torch.equal(batch["attention_mask"].sum(1), lengths)
    assert bool((batch["input_ids"][batch["attention_mask"] == 0] == 1).all())
    assert batch["token_type_ids"].max() == 1
    wider = {name: _wider(value, name) for name, value in batch.items()}
    assert torch.allclose(task.loss(task.model, batch), task.loss(task.model, wider))


def _wider(value: torch.Tensor, name: str) -> torch.Tensor:
    pad = 1 if name == "input_ids" else 0
    return value if value.dim() == 1 else torch.nn.functional.pad(value, (0, 8), value=pad)


def test_held_out_examples(bert: str, data: Path) -> None:
    task = built(config_for(bert, holdout=0.25, fraction=0.5), data)
    assert {name: len(split) for name, split in task.splits.items()} == {
        "train": 9,
        "valid": 6,
        "test": 10,
    }
    assert "valid" not in built(config_for(bert), data).splits
    train, held = hold_out(100, 0.1)
    assert sorted(train + held) == list(range(100))
    assert len(held) == 10
    fewer, again = hold_out(100, 0.1, 0.5)
    assert again == held
    assert set(fewer) < set(train)


def test_metrics_are_those_of_glue(bert: str, data: Path) -> None:
    labels, found = torch.tensor([1.0, 1, 0, 0, 1]), torch.tensor([1, 0, 0, 1, 1])
    halves = [(found[:3], labels[:3]), (found[3:], labels[3:])]
    # true positives 2, false 1, true negatives 1, false 1
    scores = built(config_for(bert), data).score(halves)
    assert scores["matthews"] == pytest.approx(100 * (2 * 1 - 1 * 1) / math.sqrt(3 * 3 * 2 * 2))
    scores = built(config_for(bert, task="mrpc"), data).score(halves)
    assert scores == pytest.approx({"f1": 100 * 2 / 3, "accuracy": 60.0})
    similarity = built(config_for(bert, task="stsb"), data)
    ordered = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0.0, 2.0, 2.5])
    assert similarity.score([ordered])["spearman"] == pytest.approx(100)
    constant = torch.ones(3), ordered[1]
    assert similarity.score([constant])["spearman"] == 0


def test_weights_in_half_precision_are_trained_in_float32(data: Path, tmp_path: Path) -> None:
    half = save_model(tmp_path / "half", "bert", torch.float16)
    task = built(config_for(str(half)), data)
    assert {p.dtype for p in task.model.parameters()} == {torch.float32}


def test_a_head_for_other_classes_is_replaced(data: Path, bert: str, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    task = built(config_for(bert, task="mrpc"), data)
    three = type(task.model.config)(**{**task.model.config.to_dict(), "num_labels": 3})
    type(task.model)(three).save_pretrained(folder)
    AutoTokenizer.from_pretrained(bert).save_pretrained(folder)
    first, second = (
        built(config_for(str(folder), task="mrpc", seed=seed), data).model for seed in (0, 1)
    )
    assert first.classifier.weight.shape == (2, 16)
    assert 0 < first.classifier.weight.abs().mean() < 0.1
    assert not torch.equal(first.classifier.weight, second.classifier.weight)
    assert torch.equal(first.bert.pooler.dense.weight, second.bert.pooler.dense.weight)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"holdout": 1.0}, "holdout must lie in"),
        ({"fraction": 0.0}, "fraction must lie in"),
        ({"max_length": 0}, "max_length must be at least 1"),
    ],
)
def test_settings_that_make_no_sense(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GlueConfig(**setting).check()


def trained(model: str, data: Path, out: Path, method: str, **changes: Any) -> Row:
    run = Run(
        recipe="glue",
        config=config_for(model, holdout=0.25, checkpoint_every=1, lens=method == "gfsa"),
        method=method,
        options=MethodConfig(filter_lr=1e-2) if method == "gfsa" else MethodConfig(),
        data_dir=data,
        out=out,
        device="cpu",
    )
    return carry_out(dataclasses.replace(run, **changes))


def test_whole_runs(bert: str, data: Path, tmp_path: Path) -> None:
    rows = {m: trained(bert, data, tmp_path, m) for m in ("plain", "gfsa")}
    assert rows["plain"].task == "cola tiny-bert"
    assert rows["plain"].metric == "matthews"
    assert rows["plain"].valid is not None
    assert rows["gfsa"].added == 12
    assert rows["gfsa"].moved is not None
    assert rows["gfsa"].moved > 0
    assert len(list(tmp_path.rglob("lens.html"))) == 1


@pytest.mark.parametrize(("holdout", "shown"), [(0.25, "valid"), (0.0, "test")])
def test_the_lens_sees_what_chooses(holdout: float, shown: str, bert: str, data: Path) -> None:
    task = built(config_for(bert, holdout=holdout), data)
    splits = {
        name: task.splits[name].dataset.__getitems__(range(min(8, len(task.splits[name]))))  # type: ignore[attr-defined]
        for name in task.splits
        if name != "train"
    }
    example = task.example()["input_ids"]
    alike = [name for name, some in splits.items() if torch.equal(some["input_ids"], example)]
    assert alike == [shown]


def test_the_test_set_of_stsb_is_reported_and_dev_chooses(
    bert: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"stsb_test\.tsv"):
        built(config_for(bert, task="stsb", report="test"), data)
    dev = (data / "STS-B" / "dev.tsv").read_text().splitlines()
    write_glue(tmp_path, "STS-B")
    (tmp_path / "stsb_test.tsv").write_text("\n".join(dev[:4]) + "\n")
    usual = built(config_for(bert, task="stsb"), tmp_path)
    task = built(config_for(bert, task="stsb", report="test"), tmp_path)
    sizes = {name: len(split) for name, split in task.splits.items()}
    assert sizes == {"train": len(usual.splits["train"]), "valid": len(dev) - 1, "test": 3}
    assert "valid" not in usual.splits


@pytest.mark.parametrize("settings", [{"task": "cola"}, {"task": "stsb", "holdout": 0.1}], ids=str)
def test_other_test_sets_have_no_public_labels(settings: dict[str, Any], bert: str) -> None:
    with pytest.raises(ValueError, match="report=test needs task=stsb"):
        config_for(bert, report="test", **settings).check()
