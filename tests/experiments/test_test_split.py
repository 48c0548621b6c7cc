"""Nothing is chosen by a test set: it is evaluated once, after the last step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gfsa_experiments.engine import trainer
from gfsa_experiments.engine.task import Split, as_it_is, sealed
from gfsa_experiments.runs.run import carry_out
from gfsa_experiments.tasks.pretrain.recipe import LanguageTask
from support import toy_recipe
from support.tiny_pretraining import a_run, write_corpus
from support.toy_recipe import ToyConfig, ToyData, ToyTask, toy_run

EVALUATED = {"epochs": 3, "eval_every": 0.5, "tensorboard": False}
CHOOSING = [
    EVALUATED | own for own in ({}, {"best": True}, {"patience": 1}, {"best": True, "ema": 0.5})
]


@pytest.mark.parametrize("settings", CHOOSING)
def test_the_test_split_is_evaluated_once_and_last(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    real = trainer.evaluate

    def watched(task: ToyTask, model: Any, split: str, *others: Any) -> dict[str, float]:
        seen.append((split, task.steps))
        return real(task, model, split, *others)

    monkeypatch.setattr(trainer, "evaluate", watched)
    row = carry_out(toy_run(tmp_path, **settings))
    assert [split for split, _ in seen].count("test") == 1
    assert seen[-1] == ("test", row.steps)
    assert len(seen) > 2


@pytest.mark.parametrize("settings", CHOOSING)
def test_another_test_set_changes_the_reported_number_alone(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With wrong test labels, training, stopping, the chosen weights and ``valid`` are the same."""
    honest = toy_run(tmp_path / "honest", **settings)
    row = carry_out(honest)

    def spoiled(config: ToyConfig, data_dir: Path) -> ToyTask:
        task = ToyTask(config)
        labels = task.splits["test"].dataset
        labels.y = 1 - labels.y  # type: ignore[attr-defined]
        return task

    recipe = dataclasses.replace(toy_recipe.RECIPE, build=spoiled)
    monkeypatch.setattr(toy_recipe, "RECIPE", recipe)
    other = toy_run(tmp_path / "spoiled", **settings)
    again = carry_out(other)
    assert again.test == pytest.approx(100 - row.test)
    for name in ("valid", "moved", "coefficients", "epochs", "steps"):
        assert getattr(again, name) == getattr(row, name), name
    assert without_test(other.folder) == without_test(honest.folder)


def without_test(folder: Path) -> list[dict[str, float]]:
    times = ("seconds", "tokens_per_second")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.startswith(("test/", *times))} for line in lines
    ]


class ReadsEarly(ToyTask):
    """Trains on the examples that it is tested on, by one of the ways to them."""

    way = "splits"

    def loss(self, model: Any, batch: Any) -> Any:
        dataset = self.splits["test"].dataset if self.way == "splits" else self.kept
        if self.way == "attribute":
            batch = {"x": dataset.x, "y": dataset.y}  # type: ignore[attr-defined]
        else:
            batch = dataset.__getitems__([0, 1])  # type: ignore[attr-defined]
        return super().loss(model, batch)

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.kept = self.splits["test"].dataset


@pytest.mark.parametrize("way", ["splits", "kept", "attribute"])
def test_a_task_that_reads_its_test_split_early_is_stopped(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReadsEarly, "way", way)
    recipe = dataclasses.replace(toy_recipe.RECIPE, build=lambda config, _: ReadsEarly(config))
    monkeypatch.setattr(toy_recipe, "RECIPE", recipe)
    run = toy_run(tmp_path, **EVALUATED)
    with pytest.raises(RuntimeError, match="test split was read before the last step"):
        carry_out(run)
    assert not (run.folder / "row.json").exists()


def test_a_pretraining_task_reads_no_test_tokens_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows of tokens have a second name, and need no batch."""
    monkeypatch.setenv("GFSA_CACHE", str(tmp_path / "cache"))
    loss = LanguageTask.loss

    def early(self: LanguageTask, model: Any, batch: Any) -> Any:
        return loss(self, model, {"part": "test", "rows": batch["rows"] * 0})

    monkeypatch.setattr(LanguageTask, "loss", early)
    with pytest.raises(RuntimeError, match="test split was read before the last step"):
        carry_out(a_run(write_corpus(tmp_path), tmp_path / "runs"))


DATASETS = [ToyData(3, 0), [1, 2, 3], torch.utils.data.Subset([4, 5], [0])]  # type: ignore[arg-type]


@pytest.mark.parametrize("dataset", DATASETS, ids=lambda dataset: type(dataset).__name__)
def test_a_seal_is_taken_off_again(dataset: Any) -> None:
    split = Split(dataset, as_it_is)
    read: Any
    for _ in range(2):
        with sealed(split):
            for read in (lambda: split.dataset[0], lambda: len(split), lambda: split.dataset.x):
                with pytest.raises(RuntimeError, match="test split was read"):
                    read()
        assert split.dataset is dataset
        assert len(split) == len(dataset) > 0
        fetch = getattr(dataset, "__getitems__", None)
        assert fetch([0]) if fetch else dataset[0]
