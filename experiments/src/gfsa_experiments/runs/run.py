"""One run: what identifies it, its folder, and how it is carried out, from its data to its row."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import platform
import re
import shlex
import shutil
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from filelock import FileLock, Timeout
from torch import Tensor, nn

import gfsa
from gfsa._version import __version__
from gfsa.environment import commit, device_name, version_of
from gfsa.plugs.saving.checkpoint import write_filters
from gfsa_experiments.engine.checkpoints import checkpoints, isolated_generators, seed_everything
from gfsa_experiments.engine.config import (
    HARMLESS,
    TrainConfig,
    as_text,
    changed_settings,
    settings_of,
)
from gfsa_experiments.engine.measure import Progress, free_memory_of_earlier_runs
from gfsa_experiments.engine.step import to_device
from gfsa_experiments.engine.task import Task
from gfsa_experiments.engine.trainer import Trainer, is_sharded, refuse_with_sharding
from gfsa_experiments.engine.whole_files import write_text
from gfsa_experiments.runs.methods import (
    MethodConfig,
    added_parameters,
    changed_options,
    find_method,
)
from gfsa_experiments.runs.row import Row
from gfsa_experiments.tasks import find_recipe

_PACKAGES = ("torch", "accelerate", "transformers", "timm", "torch-geometric", "speechbrain")


class Key(NamedTuple):
    """The columns of a row that identify its run."""

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

    def check(self) -> None:
        """Raise ValueError for everything that can be found before any data is read."""
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, got {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "device=cuda, but torch finds no GPU here; auto uses a GPU if there is one"
            )
        self.config.check()
        self._changed_options()

    def _changed_options(self) -> dict[str, Any]:
        return changed_options(find_method(self.method), self.options)

    def key(self) -> Key:
        """What identifies this run."""
        return Key(
            recipe=find_recipe(self.recipe).name,
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
        changed = changed_settings(self.config) | self._changed_options()
        # quoted one by one: a value may have blanks in it
        pairs = [shlex.quote(as_text({name: value})) for name, value in changed.items()]
        return " ".join(map(str, words)) + "".join(f" --set {pair}" for pair in pairs)

    @property
    def folder(self) -> Path:
        """The run's folder, whose path is unique to its settings."""
        key = self.key()
        name = _file_name(f"{key.method} {key.options}")
        if key.settings:
            name += "-" + sha256(key.settings.encode()).hexdigest()[:8]
        return self.out / key.recipe / _file_name(key.task) / name / f"seed-{key.seed}"

    def __str__(self) -> str:
        key = self.key()
        words = (key.recipe, key.task, key.method, key.options)
        return " ".join(word for word in words if word) + f" seed {key.seed}"


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", text.strip()).strip("_")


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
    if is_sharded(accelerator):
        refuse_with_sharding(run.config)
    with contextlib.ExitStack() as held:
        if accelerator.is_main_process:
            # the system releases the lock when the process ends in any way
            run.folder.mkdir(parents=True, exist_ok=True)
            try:
                held.enter_context(FileLock(run.folder / ".lock", timeout=0))
            except Timeout as error:
                message = f"another process is running the run in {run.folder}"
                raise FileExistsError(message) from error
            _claim(run, accelerator.num_processes)
        accelerator.wait_for_everyone()
        finished = read_row(run.folder)
        if finished is None and accelerator.is_main_process:
            _write_environment(run.folder, accelerator.device)
        if run.config.precision == "tf32":
            before = torch.get_float32_matmul_precision()
            held.callback(torch.set_float32_matmul_precision, before)
            torch.set_float32_matmul_precision("high")
        task = build_task(run)
        data = _record_data(run, task, accelerator)
        if finished is None:
            return _train(run, task, data, accelerator, progress)
    wanted = {"model.pt": run.config.save_model, "lens.html": run.config.lens}
    for name, asked in wanted.items():
        if asked and not (run.folder / name).exists():
            raise ValueError(
                f"{run.folder} holds a finished run without {name}; delete it to run again"
            )
    return finished


def _accelerator(run: Run) -> Accelerator:
    # accelerate keeps the precision of the last run in this process
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    precision = run.config.precision
    return Accelerator(
        cpu=run.device == "cpu",
        mixed_precision="no" if precision in ("fp32", "tf32") else precision,
        log_with="tensorboard" if run.config.tensorboard else None,
        project_dir=run.folder,
    )


def build_task(run: Run) -> Task:
    """The task of a run, with a model that depends on the seed alone, and then on the method."""
    seed_everything(run.config.seed)
    recipe = find_recipe(run.recipe)
    try:
        task = recipe.build(run.config, run.data_dir)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"recipe {recipe.name} needs {error.name}, which is not installed. In a checkout of "
            f"gfsa, pip install './experiments[{recipe.extra}]' installs all that it needs"
        ) from error
    find_method(run.method).apply(task.model, run.options)
    return task


def _train(
    run: Run, task: Task, data: str, accelerator: Accelerator, progress: Progress | None
) -> Row:
    folder, config = run.folder, run.config
    # the same state for every method, however many numbers its initialisation drew, and
    # another dropout in each process
    seed_everything(config.seed + 7919 * accelerator.process_index)
    added = added_parameters(task.model)
    trainer = Trainer(task, config, accelerator, folder, added, run.options.filter_lr)
    try:
        results = trainer.fit(run.resume, progress)
    except FloatingPointError as error:
        row = _row_of(run, task, data, trainer.columns(), accelerator)
        if accelerator.is_main_process:
            write_json(folder / "row.json", dataclasses.asdict(row))
        raise DivergedError(str(error), row) from error
    if is_sharded(accelerator):
        # the row and the files are made of whole weights
        weights = accelerator.get_state_dict(trainer.bare_model)
        task = build_task(run)
        if accelerator.is_main_process:
            task.model.load_state_dict(weights)
            task.model.to(accelerator.device)
    row = _row_of(run, task, data, results, accelerator)
    if accelerator.is_main_process:
        _keep_files(run, task)
        write_json(folder / "row.json", dataclasses.asdict(row))
        # a finished run is not resumed
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        (folder / "error.txt").unlink(missing_ok=True)
    return row


def _row_of(
    run: Run, task: Task, data: str, results: dict[str, Any], accelerator: Accelerator
) -> Row:
    count, name = accelerator.num_processes, device_name(accelerator.device)
    return Row(
        **run.key()._asdict(),
        **results,
        parameters=_trainable(task.model.parameters()),
        added=_trainable(added_parameters(task.model)),
        coefficients=_coefficients(task.model),
        jobs=run.jobs,
        device=name if count == 1 else f"{count} × {name}",
        precision=run.config.precision,
        torch=torch.__version__,
        gfsa=__version__,
        commit=commit(),
        date=_now(),
        command=run.command,
        data=data,
    )


def _trainable(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters if p.requires_grad)


def _polynomials(model: nn.Module) -> list[gfsa.GraphFilter]:
    """The model's filters that are a polynomial of A; those of some baselines are not."""
    return [f for f in gfsa.filters_of(model).values() if f.is_polynomial]


def _coefficients(model: nn.Module) -> str:
    """The coefficient of each power of A, averaged over heads and layers."""
    found = [f.coefficients().detach().double().cpu() for f in _polynomials(model)]
    if not found:
        return ""
    powers = max(c.shape[1] for c in found)
    rows = torch.cat([nn.functional.pad(c, (0, powers - c.shape[1])) for c in found])
    return " ".join(f"{value:.4f}" for value in rows.mean(0).tolist())


def _keep_files(run: Run, task: Task) -> None:
    """Save filters, and if wanted weights, probes and a lens page, in the run's folder."""
    folder, model = run.folder, task.model
    if _polynomials(model):
        # save_model says whether the trained backbone is kept, so no warning is due
        write_filters(model, folder / "filters")
    if run.config.save_model:
        torch.save(model.state_dict(), folder / "model.pt")
    probes = task.probes(model)
    if probes is not None:
        write_json(folder / "probes.json", probes)
    if not run.config.lens:
        return
    inputs = to_device(task.example(), next(model.parameters()).device)
    if inputs is None:
        warnings.warn(f"no lens page: recipe {run.recipe} has no example inputs", stacklevel=2)
        return
    report = gfsa.diagnose({run.method: model}, inputs, progress=False)
    report.to_html(folder / "lens.html")
    report.to_json(folder / "lens.json")


def _claim(run: Run, processes: int) -> None:
    """Begin a run in its folder, or check that the one that is there may be continued.

    Of a finished run harmless settings may differ. A run without a checkpoint begins again.
    """
    folder = run.folder
    settings = {
        "processes": processes,
        "recipe": run.recipe,
        "method": run.method,
        "options": dataclasses.asdict(run.options),
        **dataclasses.asdict(run.config),
    }
    is_finished = (folder / "row.json").exists()
    if not is_finished and not checkpoints(folder / "checkpoints"):
        (folder / "data.json").unlink(missing_ok=True)
        write_json(folder / "config.json", settings)
        return
    if not run.resume:
        raise FileExistsError(
            f"{folder} holds a run already; --resume continues it, --out names another place, "
            "or delete it"
        )
    # through JSON, which turns tuples into lists
    old, new = read_json(folder / "config.json"), json.loads(json.dumps(settings))
    names = sorted((old.keys() | new.keys()) - set(HARMLESS if is_finished else ()))
    differing = [f"{k}: {old.get(k)!r} → {new.get(k)!r}" for k in names if old.get(k) != new.get(k)]
    if differing:
        raise ValueError(
            f"{folder} holds a run with other settings ({', '.join(differing)}); use another --out"
        )


def _write_environment(folder: Path, device: Any) -> None:
    """Write ``environment.json``: machine, versions and command."""
    record = {
        "device": device_name(device),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: version_of(name) for name in _PACKAGES if version_of(name)},
        "commit": commit(),
        "command": " ".join(["gfsa", *sys.argv[1:]]),
        "date": _now(),
    }
    write_json(folder / "environment.json", record)


@functools.cache
def _say_of_runs(out: Path, text: str) -> None:
    """Print it once for all runs of this process in the folder ``out``."""
    print(text, flush=True)


def _record_data(run: Run, task: Task, accelerator: Accelerator) -> str:
    """The data's fingerprint, after comparing it with that in the run's folder."""
    data, record = fingerprint(task), run.folder / "data.json"
    if run.resume and record.exists():
        begun = read_json(record)
        if begun["data"] != data:
            raise ValueError(
                f"{run.folder} holds a run on other data, {begun['data']} from "
                f"{begun['data_dir']}, got {data}; give it that data, or use another --out"
            )
    # every process has compared before the main process writes
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        # the whole path stays in the run's folder, because rows are published
        write_json(record, {"data": data, "data_dir": str(run.data_dir.resolve())})
        if task.own_data is not None:
            write_json(run.folder / "splits.json", dataclasses.asdict(task.own_data))
            _say_of_runs(run.out, f"data {task.own_data}")
    return data


_PARTS = ("train", "valid", "test")
# examples hashed per split: enough to distinguish data sets, few enough to be read quickly
_EXAMPLES = 32
# nesting depth below which a value counts by its type alone
_DEEPEST = 8


def fingerprint(task: Task) -> str:
    """``45000+5000+10000 3fa2c1d0``: the sizes of train, valid and test, and a hash.

    The hash is over evenly spaced examples, as :meth:`Task.identity` returns them, and over what
    :class:`OwnData` has of the caller's own. The random state of training does not change.
    """
    sizes = {name: len(task.splits[name]) if name in task.splits else 0 for name in _PARTS}
    digest = sha256()
    with isolated_generators(0):
        for name, size in sizes.items():
            # evenly spaced from the first to the last
            spread = np.arange(_EXAMPLES) * (size - 1) // (_EXAMPLES - 1)
            for index in np.unique(spread).tolist() if size else ():
                for piece in _pieces(task.identity(name, index)):
                    digest.update(piece)
    if task.own_data is not None:
        # two versions of a table may differ in a few labels to train on
        digest.update(task.own_data.digest.encode())
    return f"{'+'.join(map(str, sizes.values()))} {digest.hexdigest()[:8]}"


def _pieces(value: Any, depth: int = 0) -> Iterator[bytes]:
    """A value as bytes: its type, its size and its content.

    The same in every process: independent of addresses, of the order of a dict and of the width
    that a number is stored in.
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu().to_dense()
        # numpy lacks bfloat16
        value = value.double() if value.is_floating_point() else value
        value = value.resolve_conj().resolve_neg().numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        yield from _of_array(np.asarray(value), depth)
    elif isinstance(value, (str, bytes)):
        content = value.encode() if isinstance(value, str) else value
        yield f"{type(value).__name__} {len(content)}:".encode() + content
    elif value is None or isinstance(value, (bool, int, float, complex)):
        yield f"{type(value).__name__} {value!r}:".encode()
    elif isinstance(value, PurePath):
        # folders differ between machines
        yield from _pieces(value.name)
    elif hasattr(value, "tobytes") and hasattr(value, "mode"):
        # an image of Pillow
        yield from _pieces([value.mode, *value.size, value.tobytes()], depth)
    elif depth == _DEEPEST or isinstance(value, types.ModuleType) or callable(value):
        yield f"{type(value).__name__}:".encode()
    elif isinstance(value, (list, tuple)):
        yield f"list {len(value)}:".encode()
        for part in value:
            yield from _pieces(part, depth + 1)
    else:
        named = {str(name): part for name, part in _members(value).items()}
        yield f"dict {len(named)}:".encode()
        for name in sorted(named):
            yield from _pieces(name, depth + 1)
            yield from _pieces(named[name], depth + 1)


def _of_array(array: np.ndarray, depth: int) -> Iterator[bytes]:
    kind = "i" if array.dtype.kind in "biumM" else array.dtype.kind
    if kind not in "ifc":
        # text and objects
        yield from _pieces(array.tolist(), depth)
        return
    array = array.astype({"i": "<i8", "f": "<f8", "c": "<c16"}[kind])
    if kind == "f":
        # NaN has many bit patterns
        array = np.where(np.isnan(array), np.nan, array)
    yield f"{kind} {array.shape}:".encode() + array.tobytes()


def _members(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "to_dict"):
        # a graph of PyG
        return dict(value.to_dict())
    return getattr(value, "__dict__", {}) | {"": type(value).__name__}


def read_row(folder: Path) -> Row | None:
    """The result of a finished run; None if it is not finished."""
    path = folder / "row.json"
    if not path.exists():
        return None
    try:
        return Row(**read_json(path))
    except TypeError as error:
        raise ValueError(f"{path} is of another version, delete its folder: {error}") from error


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def write_json(path: Path, data: Any) -> None:
    """Write a whole file, or nothing if interrupted."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged, delete its folder to run again: {error}") from error
