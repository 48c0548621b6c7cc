"""Runs that version d3ade9e wrote: an interrupted one is resumed, a finished one is read."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from gfsa_experiments.engine.evaluate import evaluate
from gfsa_experiments.results.tables import read_folder
from gfsa_experiments.runs.load_run import trained_task
from gfsa_experiments.runs.methods import MethodConfig
from gfsa_experiments.runs.row import Row, read_rows
from gfsa_experiments.runs.run import Run, carry_out
from support.toy_recipe import ToyConfig

KEPT = Path(__file__).parents[1] / "data" / "d3ade9e" / "run"
INTERRUPTED: dict[str, Any] = {"epochs": 3, "warmup": 0.1, "ema": 0.9, "best": True}
INTERRUPTED |= {"checkpoint_every": 4, "tensorboard": False}
FINISHED: dict[str, Any] = {"save_model": True, "tensorboard": False}


def run(out: Path, settings: dict[str, Any]) -> Run:
    return Run(
        recipe="support.toy_recipe",
        config=ToyConfig(**settings),
        method="gfsa",
        options=MethodConfig(filter_lr=0.1),
        out=out,
        device="cpu",
        resume=True,
    )


def comparable(row: Row) -> dict[str, Any]:
    """A row without times, versions and machine."""
    ignored = ("seconds", "seconds_per_step", "date", "commit", "device", "torch", "gfsa", "moved")
    return {k: v for k, v in dataclasses.asdict(row).items() if k not in ignored}


def test_an_interrupted_run_is_resumed_and_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    kept = run(shutil.copytree(KEPT / "interrupted", tmp_path / "kept"), INTERRUPTED)
    assert (kept.folder / "checkpoints" / "step-000000012").is_dir()
    resumed = carry_out(kept)
    whole = carry_out(run(tmp_path / "whole", INTERRUPTED))
    assert comparable(resumed) == comparable(whole)
    # the machine that wrote the checkpoint may add in another order than this one
    assert resumed.moved == pytest.approx(whole.moved, rel=1e-4)
    # it was resumed, not trained anew: its history begins with the one in the checkpoint
    (old,) = (KEPT / "interrupted").rglob("metrics.jsonl")
    lines = (kept.folder / "metrics.jsonl").read_text().splitlines()
    assert lines[:4] == old.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 6, 8, 12, 16, 18, 18]


def test_a_finished_run_gives_its_row_and_its_model(tmp_path: Path) -> None:
    kept = run(shutil.copytree(KEPT / "finished", tmp_path / "kept"), FINISHED)
    row = carry_out(kept)
    assert dataclasses.asdict(row) == json.loads((kept.folder / "row.json").read_text())
    task = trained_task(kept.folder, tmp_path)
    score = evaluate(task, task.model, "test", kept.config, Accelerator(cpu=True))
    assert score["accuracy"] == row.test


def test_its_rows_are_read() -> None:
    rows = read_rows(KEPT / "results" / "toy.csv")
    assert [(row.method, row.seed, row.test) for row in rows] == [
        ("plain", 0, 70.0),
        ("plain", 1, 70.0),
        ("gfsa", 0, 70.0),
        ("gfsa", 1, 73.33333333333333),
    ]
    assert len(read_folder(KEPT / "results").rows) == 4
