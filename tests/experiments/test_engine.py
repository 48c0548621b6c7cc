"""The training loop: deterministic, resumable to the bit, and honest about what failed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from filelock import FileLock

import gfsa
from gfsa_experiments.engine.checkpoints import checkpoints
from gfsa_experiments.engine.trainer import evaluate
from gfsa_experiments.runs import sweep
from gfsa_experiments.runs.load_run import trained_task
from gfsa_experiments.runs.methods import METHODS, MethodConfig
from gfsa_experiments.runs.row import Row, append_rows, read_rows
from gfsa_experiments.runs.run import DivergedError, Run, carry_out
from support.toy_recipe import ToyConfig, ToyModel, ToyTask, write_toy
from support.toy_recipe import toy_run as run


def same(row: Row, other: Row) -> bool:
    """Equal in everything that is not time."""
    times = {"seconds": 0, "seconds_per_step": 0, "date": "", "commit": ""}
    return dataclasses.replace(row, **times) == dataclasses.replace(other, **times)


def metrics(one: Run) -> list[dict[str, float]]:
    return [json.loads(line) for line in (one.folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_folder_and_learns(tmp_path: Path) -> None:
    one = run(tmp_path, epochs=20, lens=True, save_model=True)
    row = carry_out(one)
    assert row.test > 80
    assert row.moved is not None
    assert row.moved > 0.05
    assert row.added == 12
    assert row.steps == 20 * 6
    names = {path.name for path in one.folder.iterdir()}
    assert {"config.json", "environment.json", "data.json", "metrics.jsonl", "row.json"} <= names
    assert {"filters", "lens.html", "lens.json", "model.pt", "tensorboard"} <= names
    assert "checkpoints" not in names
    assert metrics(one)[-1]["test/accuracy"] == row.test
    # the model comes back as it was trained, and the filters are its filters
    task = trained_task(one.folder, tmp_path)
    score = evaluate(task, task.model, "test", one.config, Accelerator(cpu=True))
    assert score["accuracy"] == row.test
    fresh = ToyModel(0.0)
    gfsa.load(fresh, one.folder / "filters")
    for name, filtered in gfsa.filters_of(fresh).items():
        trained = gfsa.filters_of(task.model)[name]
        assert torch.equal(filtered.coefficients(), trained.coefficients())


def test_the_same_seed_gives_the_same_numbers_and_another_does_not(tmp_path: Path) -> None:
    first = carry_out(run(tmp_path / "a"))
    again = carry_out(run(tmp_path / "b"))
    other = carry_out(run(tmp_path / "c", seed=1))
    assert same(first, again)
    assert first.moved != other.moved


def test_methods_begin_as_the_same_model_on_the_same_data(tmp_path: Path) -> None:
    settings = {"max_steps": 1, "log_every": 1}
    plain, filtered = run(tmp_path, "plain", **settings), run(tmp_path, "gfsa", **settings)
    assert carry_out(plain).data == carry_out(filtered).data
    assert metrics(plain)[0]["loss"] == metrics(filtered)[0]["loss"]


@pytest.mark.parametrize(("epochs", "steps"), [(1.1, 11), (1.11, 12), (0.3, 3), (1e-5, 1)])
def test_a_fraction_of_an_epoch(epochs: float, steps: int) -> None:
    assert ToyConfig(epochs=epochs).total_steps(10) == steps


@pytest.mark.parametrize("method", [name for name in METHODS if name != "gfsa"])
def test_every_method_trains(tmp_path: Path, method: str) -> None:
    one = dataclasses.replace(run(tmp_path, method, epochs=1), options=MethodConfig())
    row = carry_out(one)
    assert row.steps == 6
    learns_nothing = {"plain", "twicing", "resformer", "contranorm", "neutreno", "exclusive"}
    learns_nothing |= {"fixed-identity"}
    assert (row.added == 0) == (method in learns_nothing)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ema": 0.9, "best": True, "checkpoint_every": 4},
        {"workers": 1, "group_by_length": True, "checkpoint_every": 4, "schedule": "cosine"},
    ],
    ids=["plain", "averaged", "workers"],
)
def test_interrupted_anywhere_it_ends_with_the_same_numbers(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"epochs": 3, "warmup": 0.1, **settings}
    whole = run(tmp_path / "whole", **settings)
    expected = carry_out(whole)

    calls = iter(range(10_000))
    healthy = ToyTask.loss

    def dies_at_step_13(self: Any, model: Any, batch: Any) -> Any:
        if next(calls) == 13:
            raise KeyboardInterrupt
        return healthy(self, model, batch)

    broken = run(tmp_path / "broken", **settings)
    monkeypatch.setattr(ToyTask, "loss", dies_at_step_13)
    with pytest.raises(KeyboardInterrupt):
        carry_out(broken)
    monkeypatch.setattr(ToyTask, "loss", healthy)
    row = carry_out(dataclasses.replace(broken, resume=True))
    assert same(row, expected)
    assert metrics(broken) == metrics(whole)


_WORKER = """
import sys
from pathlib import Path
from support.toy_recipe import toy_run
from gfsa_experiments.runs.run import carry_out
carry_out(toy_run(Path(sys.argv[1]), resume=True, epochs=10, checkpoint_every=1))
"""


def python_path() -> str:
    """Where a subprocess finds the tests' modules, and the same sources as this process."""
    return os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])


def _newest(out: Path) -> int:
    """Steps of the newest checkpoint."""
    (folder,) = [*out.glob("toy/toy/*/seed-0/checkpoints")] or [out]
    names = os.listdir(folder) if folder.exists() else []
    return max((int(name[5:]) for name in names if name.startswith("step-")), default=0)


def test_killed_without_warning_it_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WORKER, str(tmp_path / "killed")]
    # sums are split among threads: to the bit means on as many
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    environ = {**os.environ, **threads, "PYTHONPATH": python_path()}
    killed = 0
    # a checkpoint after every step: most kills fall into the writing of one
    for after in (3, 8):
        process = subprocess.Popen(command, env=environ)
        while process.poll() is None and _newest(tmp_path / "killed") < after:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed == 2
    one = run(tmp_path / "killed", resume=True, epochs=10, checkpoint_every=1)
    row = carry_out(one)
    expected = carry_out(dataclasses.replace(one, out=tmp_path / "whole"))
    assert same(row, expected)


def test_a_finished_run_is_neither_repeated_nor_overwritten(tmp_path: Path) -> None:
    one, again = run(tmp_path), run(tmp_path, resume=True)
    row = carry_out(one)
    with pytest.raises(FileExistsError, match="--resume"):
        carry_out(one)
    assert carry_out(again) == row
    with pytest.raises(ValueError, match=r"model\.pt"):
        carry_out(run(tmp_path, resume=True, save_model=True))
    config = one.folder / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"processes": 1', '"processes": 2'))
    with pytest.raises(ValueError, match="processes: 2 → 1"):
        carry_out(again)
    config.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        carry_out(again)
    config.write_text(text)
    (one.folder / "row.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"row\.json is of another version"):
        carry_out(again)


def test_going_on_with_other_settings_is_refused(tmp_path: Path) -> None:
    one = run(tmp_path, workers=0)
    carry_out(one)
    # harmless settings do not change the folder, but they are part of what was asked for
    (one.folder / "row.json").unlink()
    (one.folder / "checkpoints" / "step-000000001").mkdir(parents=True)
    (one.folder / "checkpoints" / "step-000000001" / "loop.pt").touch()
    with pytest.raises(ValueError, match=r"log_every: 50 → 7"):
        carry_out(run(tmp_path, resume=True, log_every=7))


def test_a_finished_run_is_handed_out_for_its_own_data_alone(tmp_path: Path) -> None:
    first, second = write_toy(tmp_path / "a", 0), write_toy(tmp_path / "b", 5)
    one = dataclasses.replace(run(tmp_path / "runs"), data_dir=first)
    row = carry_out(one)
    assert row.data.startswith("44+20+30 ")
    # where the data lay is in the run's folder alone: rows are published
    record = json.loads((one.folder / "data.json").read_text())
    assert record == {"data": row.data, "data_dir": str(first.resolve())}
    assert str(first) not in (one.folder / "row.json").read_text()
    again = dataclasses.replace(one, resume=True)
    with pytest.raises(ValueError, match=r"a run on other data, .* from .*use another --out"):
        carry_out(dataclasses.replace(again, data_dir=second))
    assert carry_out(dataclasses.replace(again, data_dir=write_toy(tmp_path / "c", 0))) == row
    # the same path with other data in it
    (first / "first_seed.txt").write_text("5")
    with pytest.raises(ValueError, match="a run on other data"):
        carry_out(again)


def test_early_stopping_reports_the_best_weights(tmp_path: Path) -> None:
    one = run(tmp_path, epochs=60, patience=3, lr=3e-2)
    row = carry_out(one)
    lines = [line for line in metrics(one) if "valid/accuracy" in line]
    scores = [line["valid/accuracy"] for line in lines]
    assert row.steps < 60 * 6
    assert len(scores) == scores.index(max(scores)) + 1 + 3
    assert row.valid == max(scores)


def test_the_average_of_weights_is_what_its_formula_says() -> None:
    from gfsa_experiments.engine.step import WeightAverage

    model = torch.nn.BatchNorm1d(3)
    average, expected = WeightAverage(model, decay=0.5), torch.ones(3)
    for step in range(1, 6):
        with torch.no_grad():
            model.weight += step
            model.running_mean += 1
        average.update(model, step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    assert torch.allclose(average.module.weight, expected)
    assert torch.equal(average.module.running_mean, model.running_mean)


def test_augmentation_is_the_same_for_every_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[float]] = {"plain": [], "gfsa": []}
    healthy = ToyTask.loss
    for method, noise in seen.items():

        def loss(
            self: Any, model: Any, batch: Any, noise: Any = noise, healthy: Any = healthy
        ) -> Any:
            # a method that draws other random numbers than plain does
            torch.rand(len(noise) if noise is seen["gfsa"] else 1)
            noise.append(float(batch["x"].sum()))
            return healthy(self, model, batch)

        with monkeypatch.context() as patch:
            patch.setattr(ToyTask, "loss", loss)
            carry_out(run(tmp_path, method))
    assert seen["plain"] == seen["gfsa"]
    assert len(set(seen["plain"])) == 12


def test_divergence_is_an_error_and_a_result(tmp_path: Path) -> None:
    one = run(tmp_path, explode_at=3)
    with pytest.raises(DivergedError, match="smaller lr") as caught:
        carry_out(one)
    assert math.isnan(caught.value.row.test)
    assert caught.value.row.steps == 6
    append_rows(tmp_path / "toy.csv", [caught.value.row])
    assert math.isnan(read_rows(tmp_path / "toy.csv")[0].test)


def test_all_processes_end_a_run_that_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is not raised to the launcher, which would end the sweep."""
    row = sweep.attempt(run(tmp_path, explode_at=3)).row
    assert row is not None
    diverge = mock.Mock(side_effect=DivergedError("the loss is inf", row))
    monkeypatch.setattr(sweep, "carry_out", diverge)
    monkeypatch.setenv("WORLD_SIZE", "2")
    one = run(tmp_path)
    assert sweep.attempt(one) == (one, row, "the loss is inf")


def damage_newest(folder: Path, name: str) -> None:
    (path,) = checkpoints(folder / "checkpoints")[0].rglob(name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "optimizer.bin", "random_states_0.pkl", "loop.pt"]
)
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = carry_out(run(tmp_path / "whole", epochs=3))
    broken = run(tmp_path / "broken", epochs=3)
    with monkeypatch.context() as patch:
        patch.setattr("gfsa_experiments.engine.trainer.Trainer.columns", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            carry_out(broken)
    assert len(checkpoints(broken.folder / "checkpoints")) == 2
    damage_newest(broken.folder, name)
    with pytest.warns(UserWarning, match="is skipped"):
        row = carry_out(dataclasses.replace(broken, resume=True))
    assert same(row, expected)


def _interrupt(self: Any, *metrics: Any) -> None:
    raise KeyboardInterrupt


def test_two_processes_are_not_at_the_same_run(tmp_path: Path) -> None:
    one = run(tmp_path)
    one.folder.mkdir(parents=True)
    with FileLock(one.folder / ".lock"), pytest.raises(FileExistsError, match="another process"):
        carry_out(one)
    assert carry_out(one).steps == 12


def test_a_score_that_is_no_number_is_not_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy, calls = ToyTask.score, iter(range(100))

    def first_is_nan(self: Any, predictions: Any) -> dict[str, float]:
        scores = healthy(self, predictions)
        return scores | {"accuracy": math.nan} if next(calls) == 0 else scores

    monkeypatch.setattr(ToyTask, "score", first_is_nan)
    row = carry_out(run(tmp_path, best=True, epochs=3))
    assert row.valid is not None
    assert math.isfinite(row.valid)


def test_many_may_add_rows(tmp_path: Path) -> None:
    row = carry_out(run(tmp_path))
    table = tmp_path / "toy.csv"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: append_rows(table, [row]), range(160)))
    assert read_rows(table) == [row] * 160


_LAUNCHED = """
import sys
from pathlib import Path
import torch
import support.toy_recipe
from support.toy_recipe import ToyModel, ToyTask, toy_run
from gfsa_experiments.runs.run import carry_out
# a buffer that training changes in each process by its own share, as batch norms have
class Averaging(ToyModel):
    def __init__(self, dropout):
        super().__init__(dropout)
        self.register_buffer("mean", torch.zeros(()))
    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(), 0.1)
        return super().forward(x)
support.toy_recipe.ToyModel = Averaging
def score(self, predictions, own=ToyTask.score):
    found = [None, None]
    torch.distributed.all_gather_object(found, float(self.model.mean))
    assert found[0] == found[1] != 0, found
    return own(self, predictions)
ToyTask.score = score
ToyTask.prepare = lambda self, batch: batch
# more than one process has examples to evaluate
row = carry_out(toy_run(Path(sys.argv[1]), epochs=1, dropout=0.0, eval_batch_size=64))
assert row.others == "count=30.0"

# a run that keeps its best weights, and is interrupted after the first evaluation
again = toy_run(Path(sys.argv[1]) / "interrupted", "plain", True, epochs=2, best=True,
                checkpoint_every=1)
def loss(self, *args, own=ToyTask.loss):
    if self.steps == 7:
        raise InterruptedError
    return own(self, *args)
ToyTask.loss, own = loss, ToyTask.loss
try:
    carry_out(again)
except InterruptedError:
    ToyTask.loss = own
assert carry_out(again).steps == 10
"""


def test_two_processes_train_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "launched.py"
    # without noise of their own in each process
    script.write_text(_LAUNCHED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(script), str(tmp_path / "two")],
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(ToyTask, "prepare", lambda self, batch: batch)
    row = carry_out(run(tmp_path / "one", epochs=1, dropout=0.0, drop_last=True))
    (path,) = (tmp_path / "two" / "toy").rglob("row.json")
    two = Row(**json.loads(path.read_text()))
    assert two.steps == row.steps
    assert two.moved == pytest.approx(row.moved, rel=1e-4)
    assert two.test == row.test
