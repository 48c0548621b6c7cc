"""One run: what identifies it, and how it is carried out, from its data to its row."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from filelock import FileLock, Timeout
from torch import nn

from gfsa_experiments.engine.checkpoints import seed_everything
from gfsa_experiments.engine.config import (
    TrainConfig,
    as_text,
    changed_settings,
    settings_of,
    without_folders,
)
from gfsa_experiments.engine.measure import Progress, free_memory_of_earlier_runs
from gfsa_experiments.engine.task import Task
from gfsa_experiments.engine.trainer import Trainer, is_sharded, refuse_with_sharding, whole_weights
from gfsa_experiments.runs.data import difference, fingerprint, warn_of_rows_on_other_data
from gfsa_experiments.runs.finish import keep_files, row_of
from gfsa_experiments.runs.methods import (
    MethodConfig,
    added_parameters,
    changed_options,
    find_method,
)
from gfsa_experiments.runs.row import Experiment, Row
from gfsa_experiments.runs.run_folder import (
    claim,
    read_json,
    read_row,
    run_folder,
    write_environment,
    write_json,
    write_row,
)
from gfsa_experiments.tasks import find_recipe


@contextlib.contextmanager
def arithmetic_of(config: TrainConfig) -> Iterator[None]:
    """Torch's deterministic algorithms and TF32, if the settings want them, for one run."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    if config.deterministic:
        # cuBLAS reads this when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if config.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_float32_matmul_precision(before[1])


class Key(NamedTuple):
    """The columns of a row that identify its run."""

    recipe: str
    task: str
    method: str
    options: str
    settings: str
    seed: int

    @property
    def experiment(self) -> Experiment:
        return self.recipe, self.task, self.settings


@dataclass(frozen=True, kw_only=True)
class Run:
    """One model trained with one method under one seed."""

    recipe: str
    config: TrainConfig
    method: str = "plain"
    options: MethodConfig = dataclasses.field(default_factory=MethodConfig)
    data_dir: Path = Path("data")
    out: Path = Path("runs")
    device: str = "auto"
    resume: bool = False
    jobs: int = 1
    results: Path | None = None
    """A folder of rows: the run warns if rows of its experiment there are on other data."""

    def check(self) -> None:
        """Raise ValueError for everything that can be found before any data is read."""
        refuse_missing_device(self.device)
        refuse_half_precision(self.config.precision, self.device)
        self.config.check()
        self._changed_options()

    def _changed_options(self) -> dict[str, Any]:
        return changed_options(find_method(self.method), self.options)

    def key(self) -> Key:
        """What identifies this run."""
        recipe = find_recipe(self.recipe)
        return Key(
            recipe=recipe.name,
            task=self.config.label(),
            method=self.method,
            options=as_text(self._changed_options()),
            settings=settings_of(self.config),
            seed=self.config.seed,
        )

    @property
    def command(self) -> str:
        """The command of this run alone; data outside of the working folder needs --data-dir."""
        words = ["gfsa train", self.recipe, "--method", self.method, "--seeds", self.config.seed]
        changed = without_folders(changed_settings(self.config)) | self._changed_options()
        # quoted one by one: a value may have blanks in it
        pairs = [shlex.quote(as_text({name: value})) for name, value in changed.items()]
        return " ".join(map(str, words)) + "".join(f" --set {pair}" for pair in pairs)

    @property
    def folder(self) -> Path:
        return run_folder(self.out, *self.key())

    @property
    def is_resumed_and_finished(self) -> bool:
        """Whether the run only gives the row that is in its folder."""
        return self.resume and (self.folder / "row.json").exists()

    def __str__(self) -> str:
        key = self.key()
        words = (key.recipe, key.task, key.method, key.options)
        return " ".join(word for word in words if word) + f" seed {key.seed}"


# what was printed about own data: once for all runs of this process on it
_SAID: set[tuple[Path, str]] = set()


class DivergedError(FloatingPointError):
    """The loss became infinite or NaN, or never fell; that is a result, and has a row."""

    def __init__(self, message: str, row: Row) -> None:
        super().__init__(message)
        self.row = row


def carry_out(run: Run, progress: Progress | None = None) -> Row:
    """Train, evaluate and write the run's folder; a finished run only gives its row."""
    run.check()
    accelerator = _accelerator(run)
    free_memory_of_earlier_runs(accelerator.device)
    with _exclusive(run.folder) if accelerator.is_main_process else nullcontext():
        return _carry_out(run, accelerator, progress)


def _carry_out(run: Run, accelerator: Accelerator, progress: Progress | None) -> Row:
    folder, config = run.folder, run.config
    if is_sharded(accelerator):
        refuse_with_sharding(config)
    if accelerator.is_main_process:
        claim(folder, _as_data(run, accelerator.num_processes), run.resume)
    accelerator.wait_for_everyone()
    finished = read_row(folder)
    if finished is None and accelerator.is_main_process:
        write_environment(folder, accelerator.device)
    with arithmetic_of(config):
        task = _build(run)
        data = _record_data(run, task, accelerator)
        if finished is not None:
            _refuse_lacking_files(run)
            return finished
        added = find_method(run.method).apply(task.model, run.options)
        # the same state for every method, however many numbers its initialisation drew, and
        # another dropout in each process
        seed_everything(config.seed + 7919 * accelerator.process_index)
        new = added_parameters(task.model)
        trainer = Trainer(task, config, accelerator, folder, new, run.options.filter_lr)
        try:
            outcome = trainer.fit(run.resume, progress)
        except FloatingPointError as error:
            row = row_of(run, task, data, added, trainer.diverged_outcome(), accelerator)
            if accelerator.is_main_process:
                write_row(folder, row)
            raise DivergedError(str(error), row) from error
        model = trainer.bare_model
        if is_sharded(accelerator):
            # the row and the files are made of whole weights
            task = _with_whole_weights(run, model, accelerator)
            model = task.model
        row = row_of(run, task, data, added, outcome, accelerator)
        if accelerator.is_main_process:
            keep_files(run, task, model)
            write_row(folder, row)
            # a finished run is not resumed
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            (folder / "error.txt").unlink(missing_ok=True)
    return row


def _with_whole_weights(run: Run, sharded: nn.Module, accelerator: Accelerator) -> Task:
    """The task of a run built again; in the main process with the trained weights."""
    weights = whole_weights(sharded)
    task = _build(run)
    find_method(run.method).apply(task.model, run.options)
    if accelerator.is_main_process:
        task.model.load_state_dict(weights)
        task.model.to(accelerator.device)
    return task


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """A lock on the run's folder; the system releases it when the process ends in any way."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise FileExistsError(f"another process is running the run in {folder}") from error


def _refuse_lacking_files(run: Run) -> None:
    """Raise ValueError if a finished run lacks a file that is wanted."""
    wanted = {"model.pt": run.config.save_model, "lens.html": run.config.lens}
    for name, asked in wanted.items():
        if asked and not (run.folder / name).exists():
            raise ValueError(
                f"{run.folder} holds a finished run without {name}; delete it to run again"
            )


def _record_data(run: Run, task: Task, accelerator: Accelerator) -> str:
    """The data's fingerprint, after comparing it with what the run's folder and rows have."""
    data, record = fingerprint(task), run.folder / "data.json"
    if run.resume and record.exists():
        begun = read_json(record)
        if begun["data"] != data:
            raise ValueError(
                f"{run.folder} holds a run on other data, from {begun['data_dir']} "
                f"({difference(begun['data'], data)}); give it that data, or use another --out"
            )
    # every process has compared before the main process writes
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        # the whole path stays in the run's folder, because rows are published
        write_json(record, {"data": data, "data_dir": str(run.data_dir.resolve())})
        _record_own_data(run, task)
        warn_of_rows_on_other_data(run, data)
    return data


def _record_own_data(run: Run, task: Task) -> None:
    """Keep what was read of the caller's own data, and say it once for all runs on it."""
    if task.own_data is None:
        return
    write_json(run.folder / "splits.json", dataclasses.asdict(task.own_data))
    said = f"data {task.own_data}"
    if run.results is not None and (run.results, said) not in _SAID:
        _SAID.add((run.results, said))
        print(said, flush=True)


def _build(run: Run) -> Task:
    """The task of a run, with a model that depends on the seed alone."""
    seed_everything(run.config.seed)
    recipe = find_recipe(run.recipe)
    try:
        return recipe.build(run.config, run.data_dir)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"recipe {recipe.name} needs {error.name}, which is not installed. In a checkout of "
            f"gfsa, pip install './experiments[{recipe.extra}]' installs all that it needs"
        ) from error


def refuse_missing_device(name: str) -> None:
    """Raise ValueError for a device that is unknown or missing."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device=cuda, but torch finds no GPU here; auto uses a GPU if there is one"
        )


def refuse_half_precision(precision: str, device: str) -> None:
    """Raise ValueError for fp16 on a CPU: accelerate would train in float32, and the row say fp16.

    Args:
        device: as in :class:`Run`.
    """
    if precision == "fp16" and (device == "cpu" or not torch.accelerator.is_available()):
        raise ValueError("precision=fp16 needs a GPU; on a CPU set bf16 or fp32")


def _accelerator(run: Run) -> Accelerator:
    # accelerate keeps the precision of the last run in this process
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    precision = run.config.precision
    return Accelerator(
        cpu=run.device == "cpu",
        mixed_precision="no" if precision in ("fp32", "tf32") else precision,
        gradient_accumulation_steps=run.config.accumulate,
    )


def _as_data(run: Run, processes: int) -> dict[str, Any]:
    return {
        "processes": processes,
        "recipe": run.recipe,
        "method": run.method,
        "options": dataclasses.asdict(run.options),
        **dataclasses.asdict(run.config),
    }
