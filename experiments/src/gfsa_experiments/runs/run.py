"""What one run is, and how it is carried out from beginning to end."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

import gfsa
from gfsa._version import __version__
from gfsa.environment import commit, device_name
from gfsa_experiments.runs.locks import locked
from gfsa_experiments.tasks import find_recipe
from gfsa_experiments.engine.config import (HARMLESS, TrainConfig, as_text, changed_settings, settings_of)
from gfsa_experiments.engine.devices import check_device
from gfsa_experiments.runs.fingerprint import difference, fingerprint
from gfsa_experiments.runs.run_folder import (RunData, differences, environment, is_begun, now, read_data, read_row, run_folder, write_config, write_data, write_json, write_row)
from gfsa_experiments.engine.methods import MethodConfig, added_parameters, find_method, options_of
from gfsa_experiments.engine.randomness import seed_everything
from gfsa_experiments.runs.row import Row, rows_of_experiment
from gfsa_experiments.engine.task import Task
from gfsa_experiments.engine.trainer import Outcome, Trainer
from gfsa_experiments.engine.nested import to_device

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and a few words."""


class Key(NamedTuple):
    """What a run is, as its row says it."""

    recipe: str
    task: str
    method: str
    options: str
    settings: str
    seed: int


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
    """Where its row goes; if there are rows on other data there, a warning says so."""

    def check(self) -> None:
        """Everything that can be wrong before any data is read."""
        self.config.check()
        options_of(find_method(self.method), self.options)

    @property
    def told_options(self) -> str:
        return as_text(options_of(find_method(self.method), self.options))

    def key(self) -> Key:
        """What tells this run from every other."""
        recipe = find_recipe(self.recipe)
        return Key(
            recipe=recipe.name,
            task=recipe.label_of(self.config, self.data_dir),
            method=self.method,
            options=self.told_options,
            settings=settings_of(self.config),
            seed=self.config.seed,
        )

    @property
    def command(self) -> str:
        """What to type for this run alone."""
        words = ["gfsa train", self.recipe, "--method", self.method, "--seeds", self.config.seed]
        options = options_of(find_method(self.method), self.options)
        changed = changed_settings(self.config) | options
        # one by one: there may be blanks in a value
        pairs = [shlex.quote(as_text({name: value})) for name, value in changed.items()]
        return " ".join(map(str, words)) + "".join(f" --set {pair}" for pair in pairs)

    @property
    def folder(self) -> Path:
        return run_folder(self.out, *self.key())

    def __str__(self) -> str:
        key = self.key()
        words = (key.recipe, key.task, key.method, key.options)
        return " ".join(word for word in words if word) + f" seed {key.seed}"


class DivergedError(FloatingPointError):
    """Training came to no finite loss; that is a result, and has a row."""

    def __init__(self, message: str, row: Row) -> None:
        super().__init__(message)
        self.row = row


def carry_out(run: Run, progress: Progress | None = None) -> Row:
    """Train, measure and write everything down; a finished run is not run again."""
    run.check()
    # what an earlier run of this process left on the device counts as this one's otherwise
    gc.collect()
    accelerator = _accelerator(run)
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()
    finished = read_row(run.folder)
    if finished is not None and run.resume:
        _check_finished(run, accelerator.num_processes)
        _check_finished_data(run)
        return finished
    with _one_at_a_time(run.folder) if accelerator.is_main_process else nullcontext():
        return _carry_out(run, accelerator, progress)


def _carry_out(run: Run, accelerator: Accelerator, progress: Progress | None) -> Row:
    folder, config = run.folder, run.config
    if accelerator.is_main_process:
        write_config(folder, _as_data(run, accelerator.num_processes), run.resume)
        write_json(folder / "environment.json", environment(accelerator.device))
    accelerator.wait_for_everyone()
    with _determinism(config.deterministic), _tensor_cores(config.precision == "tf32"):
        seed_everything(config.seed)
        task = _build(run)
        data = _note_data(run, task, accelerator)
        added = find_method(run.method).apply(task.model, run.options)
        # every method goes on from the same state, whatever it drew to begin with, and every
        # process drops other units than its neighbours
        seed_everything(config.seed + 7919 * accelerator.process_index)
        new = added_parameters(task.model)
        trainer = Trainer(task, config, accelerator, folder, new, run.options.filter_lr)
        try:
            outcome = trainer.fit(run.resume, progress)
        except FloatingPointError as error:
            row = _row(run, task, data, added, trainer.failure(), accelerator)
            if accelerator.is_main_process:
                write_row(folder, row)
            raise DivergedError(str(error), row) from error
        row = _row(run, task, data, added, outcome, accelerator)
        if accelerator.is_main_process:
            _keep(task, trainer.bare_model, folder, config, run)
            write_row(folder, row)
            # what they were for is reached, or over
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            (folder / "error.txt").unlink(missing_ok=True)
    return row


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    try:
        with locked(folder / ".lock", wait=False):
            yield
    except BlockingIOError as error:
        raise FileExistsError(f"another process is at the run in {folder}") from error


def _check_finished(run: Run, processes: int) -> None:
    """A finished run is only handed out for what it was."""
    differing = differences(run.folder, _as_data(run, processes), ignored=HARMLESS)
    if differing:
        raise ValueError(
            f"{run.folder} holds a finished run with other settings ({', '.join(differing)}); "
            "use another --out"
        )
    wanted = {"model.pt": run.config.save_model, "lens.html": run.config.lens}
    for name, asked in wanted.items():
        if asked and not (run.folder / name).exists():
            raise ValueError(
                f"{run.folder} holds a finished run that was not asked for {name}; "
                "delete it to run again"
            )


def _check_finished_data(run: Run) -> None:
    """Nor for other data; what lies where it lay is taken for the same without being read."""
    noted, place = read_data(run.folder), str(run.data_dir.resolve())
    if noted is None or noted.data_dir == place:
        return
    seed_everything(run.config.seed)
    try:
        found = fingerprint(_build(run))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{run.folder} holds a finished run on the data in {noted.data_dir}; whether that in "
            f"{place} is the same cannot be seen, give --data-dir {noted.data_dir} or use another "
            f"--out: {error}"
        ) from error
    if found != noted.data:
        raise ValueError(
            f"{run.folder} holds a finished run on other data, from {noted.data_dir} "
            f"({difference(noted.data, found)}); use another --out"
        )


def _note_data(run: Run, task: Task, accelerator: Accelerator) -> str:
    """Write down what it runs on; an interrupted run goes on with what it began with."""
    data = fingerprint(task)
    noted = read_data(run.folder) if run.resume and is_begun(run.folder) else None
    if noted is not None and noted.data != data:
        raise ValueError(
            f"{run.folder} was begun on other data, from {noted.data_dir} "
            f"({difference(noted.data, data)}); give it that data, or use another --out"
        )
    # every process has compared before one of them writes
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_data(run.folder, RunData(data, str(run.data_dir.resolve())))
        _tell_of_other_data(run, data)
    return data


def _tell_of_other_data(run: Run, data: str) -> None:
    """Warn, before hours of training, that the rows in the table are not comparable with it."""
    if run.results is None:
        return
    key = run.key()
    path = run.results / f"{key.recipe}.csv"
    seeds: dict[str, set[int]] = {}
    # for a warning's sake no run ends; who adds to the table says what is wrong with it
    with contextlib.suppress(ValueError, OSError):
        for row in rows_of_experiment(path, key.recipe, key.task, key.settings):
            if row.data not in ("", data):
                name = f"{row.method} {row.options}".strip()
                seeds.setdefault(f"{name} on {row.data}, seed ", set()).add(row.seed)
    if seeds:
        told = "; ".join(name + ", ".join(map(str, sorted(of))) for name, of in seeds.items())
        warnings.warn(
            f"{run} runs on data {data}, and {path} has rows of the same experiment on other data "
            f"({told}): they are not compared with each other",
            stacklevel=2,
        )


def _build(run: Run) -> Task:
    recipe = find_recipe(run.recipe)
    try:
        return recipe.build(run.config, run.data_dir)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"recipe {recipe.name} needs {error.name}, which is not installed: "
            f"pip install 'gfsa[{recipe.extra}]'"
        ) from error


def _accelerator(run: Run) -> Accelerator:
    # accelerate remembers the precision of the last run in this process
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    check_device(run.device)
    precision = run.config.precision
    return Accelerator(
        cpu=run.device == "cpu",
        mixed_precision="no" if precision in ("fp32", "tf32") else precision,
        gradient_accumulation_steps=run.config.accumulate,
    )


@contextlib.contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        # cuBLAS wants to be told too, before it begins
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def _tensor_cores(wanted: bool) -> Iterator[None]:
    """Let them multiply 32-bit numbers; unless that is wanted torch's settings are not touched."""
    if not wanted:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _as_data(run: Run, processes: int) -> dict[str, Any]:
    return {
        "processes": processes,
        "recipe": run.recipe,
        "method": run.method,
        "options": dataclasses.asdict(run.options),
        **dataclasses.asdict(run.config),
    }


def _row(
    run: Run, task: Task, data: str, added: int, outcome: Outcome, accelerator: Accelerator
) -> Row:
    metric = task.metric
    others = {name: round(v, 6) for name, v in outcome.test.items() if name != metric}
    return Row(
        **run.key()._asdict(),
        metric=metric,
        higher_is_better=task.higher_is_better,
        test=outcome.test[metric],
        valid=outcome.valid[metric] if outcome.valid else None,
        others=as_text(others),
        parameters=sum(p.numel() for p in task.model.parameters() if p.requires_grad),
        added=added,
        moved=outcome.moved,
        coefficients=_coefficients(task.model),
        epochs=outcome.epochs,
        steps=outcome.steps,
        seconds=round(outcome.seconds, 3),
        seconds_per_step=outcome.seconds_per_step,
        peak_memory_mib=outcome.peak_memory_mib,
        jobs=run.jobs,
        device=_devices(accelerator),
        precision=run.config.precision,
        torch=torch.__version__,
        gfsa=__version__,
        commit=commit(),
        date=now(),
        command=run.command,
        data=data,
    )


def _devices(accelerator: Accelerator) -> str:
    count, name = accelerator.num_processes, device_name(accelerator.device)
    return name if count == 1 else f"{count} × {name}"


def _polynomials(model: nn.Module) -> list[gfsa.GraphFilter]:
    """The model's filters, without those of other methods that are no polynomial of A."""
    return [f for f in gfsa.filters_of(model).values() if f.is_polynomial]


def _coefficients(model: nn.Module) -> str:
    """Mean over heads and layers of each power's coefficient."""
    found = [f.coefficients().detach().double().cpu() for f in _polynomials(model)]
    if not found:
        return ""
    powers = max(c.shape[1] for c in found)
    rows = torch.cat([nn.functional.pad(c, (0, powers - c.shape[1])) for c in found])
    return " ".join(f"{value:.4f}" for value in rows.mean(0).tolist())


def _keep(task: Task, model: nn.Module, folder: Path, config: TrainConfig, run: Run) -> None:
    """What the run leaves besides numbers."""
    if _polynomials(model):
        gfsa.save(model, folder / "filters")
    if config.save_model:
        torch.save(model.state_dict(), folder / "model.pt")
    if config.lens:
        example = task.example()
        if example is None:
            warnings.warn(f"recipe {run.recipe} gives the lens nothing to look at", stacklevel=2)
            return
        device = next(model.parameters()).device
        report = gfsa.diagnose({run.method: model}, to_device(example, device), progress=False)
        report.to_html(folder / "lens.html")
        report.to_json(folder / "lens.json")
