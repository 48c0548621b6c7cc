"""Nothing is chosen by a test set: it is evaluated once, after the last step."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import gfsa_experiments
from gfsa_experiments.engine import trainer
from gfsa_experiments.runs.methods import MethodConfig
from gfsa_experiments.runs.run import Run, carry_out
from gfsa_experiments.tasks import RECIPES, find_recipe
from support import toy_recipe
from support.toy_recipe import ToyConfig, ToyTask

SOURCES = Path(gfsa_experiments.__file__).parent


def toy_run(out: Path, **settings: Any) -> Run:
    config = ToyConfig(epochs=3, eval_every=0.5, tensorboard=False, **settings)
    options = MethodConfig(filter_lr=0.1)
    return Run(
        recipe="support.toy_recipe",
        config=config,
        method="gfsa",
        options=options,
        out=out,
        device="cpu",
    )


CHOOSING = [{}, {"best": True}, {"patience": 1}, {"best": True, "ema": 0.5}]


@pytest.mark.parametrize("settings", CHOOSING, ids=str)
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


@pytest.mark.parametrize("settings", CHOOSING, ids=str)
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
    times = ("seconds", "tokens_per_second", "mfu")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.startswith(("test/", *times))} for line in lines
    ]


def test_one_place_evaluates_the_test_split() -> None:
    """The end of ``Trainer.fit``; a recipe that called evaluate itself would be a second one."""
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and "evaluate" in ast.unparse(node.func):
                words = [word.value for word in node.args if isinstance(word, ast.Constant)]
                if "test" in words:
                    found.append(path.relative_to(SOURCES).as_posix())
    assert found == ["engine/trainer.py"]


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_evaluates_or_trains_by_itself(name: str) -> None:
    """Their only way to a metric is the loop: none imports the evaluation or the trainer."""
    find_recipe(name)
    folder = SOURCES.joinpath(*RECIPES[name].split(".")[1:-1])
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        imported = {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
        }
        forbidden = {"gfsa_experiments.engine.evaluate", "gfsa_experiments.engine.trainer"}
        assert not imported & forbidden, path
